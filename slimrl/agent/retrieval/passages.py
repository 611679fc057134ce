"""The passages of a corpus: read from its file, and kept so that all processes share one copy in memory."""

import mmap
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np

from slimrl.base.jsonl import read_jsonl

_SHOWN_ID = re.compile(r"^\[([^\s\[\]]+)\] ", re.MULTILINE)
TEXTS, ENDS = "passages.bin", "passage_ends.npy"


@dataclass(frozen=True, slots=True)
class Passage:
    text: str
    id: str = ""
    """Empty in a corpus without ids"""

    @property
    def shown(self) -> str:
        """What the policy is told."""
        return f"[{self.id}] {self.text}" if self.id else self.text


def shown_ids(told: str) -> list[str]:
    """The ids of the passages that a text shows, each at the beginning of a line, in order."""
    return _SHOWN_ID.findall(told)


def read_corpus(corpus: Path) -> list[Passage]:
    """The passages of a JSONL file of `{"text": ...}`, with `"id"` or without.

    Raises:
        ValueError: there is no such file, or a line is no passage; names them.
    """
    return read_jsonl(corpus, _passage)


def _passage(line: dict[str, Any], number: int) -> Passage:
    if not isinstance(line.get("text"), str):
        raise ValueError('has no "text"')
    name = line.get("id", "")
    if not isinstance(name, str) or any(letter in "[]" or letter.isspace() for letter in name):
        raise ValueError(f'"id" is {name!r}, not a text without white space and brackets')
    return Passage(line["text"], name)


class KeptTexts(Sequence[str]):
    """Texts in a file that is mapped into memory.

    Args:
        folder: where `write` has put them.
    """

    def __init__(self, folder: Path) -> None:
        self._ends = np.load(folder / ENDS, mmap_mode="r")
        with (folder / TEXTS).open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    @staticmethod
    def write(folder: Path, texts: Iterable[str]) -> None:
        ends, end = [0], 0
        with (folder / TEXTS).open("wb") as file:
            for text in texts:
                end += file.write(text.encode())
                ends.append(end)
            # A file of no bytes cannot be mapped.
            file.write(b"\n")
        np.save(folder / ENDS, np.array(ends, np.int64))

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> list[str]: ...
    def __getitem__(self, place: int | slice) -> str | list[str]:
        if isinstance(place, slice):
            return [self[one] for one in range(*place.indices(len(self)))]
        if not 0 <= place < len(self):
            raise IndexError(place)
        return self._bytes[self._ends[place] : self._ends[place + 1]].decode()
