"""A checkpoint of which this node may have some files only: others are brought when torch reads them.

Every rank reads the small files. Of the shards' files, torch plans which tensors a rank needs, and opens theirs.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch.distributed.checkpoint import FileSystemReader

SHARDS = ".distcp"
"""End of the names of the files that hold tensors"""


class Fetch(Protocol):
    """Brings files to this node, by their names in a checkpoint."""

    @property
    def missing(self) -> Collection[str]:
        """Those that were not there at first."""

    def __call__(self, names: Collection[str]) -> None:
        """Wait until these, of the missing ones, are there."""


@contextmanager
def fetching(fetch: Fetch | None) -> Iterator[None]:
    """Bring what is read in the block; None if all files are there."""
    if fetch is None:
        yield
        return
    fetch([name for name in fetch.missing if not name.endswith(SHARDS)])
    original = FileSystemReader.read_data

    def read_data(self: FileSystemReader, plan: Any, planner: Any) -> Any:
        names = {self.storage_data[item.storage_index].relative_path for item in plan.items}
        fetch([name for name in fetch.missing if name in names])
        return original(self, plan, planner)

    FileSystemReader.read_data = read_data  # type: ignore[method-assign]
    try:
        yield
    finally:
        FileSystemReader.read_data = original  # type: ignore[method-assign]
