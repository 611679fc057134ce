"""The finished items of an evaluation, in a file from which an interrupted evaluation goes on.

1. Each item is appended as it ends, so a killed process leaves whole lines and at most one broken one, the last.
2. Who goes on keeps every whole line but those of trajectories that failed or were aborted, which are tried again.
3. A complete evaluation is written anew in the order of its prompts, whichever ended first.
"""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import BinaryIO, Self

from slimrl.base.atomic import write_whole
from slimrl.evaluation.item import Item, Key, from_line, to_line


class Items:
    """Finished items by their keys; used as a context manager."""

    def __init__(self, path: Path | None = None) -> None:
        """
        Args:
            path: the file, read if it exists; None keeps the items in memory alone.

        Raises:
            ValueError: a line but the last one is broken; names it.
        """
        self._path = path
        self._file: BinaryIO | None = None
        self._items = {item.key: item for item in read_items(path) if not item.broke} if path is not None else {}
        if path is not None:
            write_whole(path, "".join(map(to_line, self._items.values())))
            self._file = path.open("ab", buffering=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, item: Item) -> None:
        """Append a finished item; it replaces an earlier one of the same key."""
        self._items[item.key] = item
        if self._file is not None:
            self._file.write(to_line(item).encode())

    def missing(self, keys: Sequence[Key]) -> list[Key]:
        return [key for key in keys if key not in self._items]

    def of(self, keys: Sequence[Key]) -> list[Item]:
        """The items of these keys in their order; all of them must be finished."""
        return [self._items[key] for key in keys]

    def write_in_order(self, keys: Sequence[Key]) -> None:
        """Write the file anew with the items of these keys, in their order."""
        if self._path is not None:
            write_whole(self._path, "".join(map(to_line, self.of(keys))))


def read_items(path: Path) -> list[Item]:
    """The items of a file, without the broken last line that a killed process may leave; none if there is no file.

    Raises:
        ValueError: another line is broken; names file and line.
    """
    if not path.exists():
        return []
    items = []
    with closing(path.open("rb")) as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                items.append(from_line(line))
            except ValueError as error:
                raise ValueError(f"{path}:{number}: not an item of an evaluation: {error}") from error
    return items
