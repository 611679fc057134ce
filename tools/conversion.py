"""What both directions of `convert` share: options, the plan that is told before anything is written, and records.

A record says what one output file holds, with a checksum of every tensor. It is written when the file is whole, on the
disk and checked, so it is also what an interrupted conversion goes by when it continues.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimrl_tools.output_folder import check_space, partial_path
from slimrl_tools.progress import Advance, byte_progress
from slimrl_tools.terminal import show_bytes
from slimrl_tools.workers import divide, run_workers

Say = Callable[[str], None]
"""Tells the user a line."""

RECORDS = ".records"
"""Folder within an unfinished output."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to convert, whichever way."""

    dtype: str | None = None
    """As torch prints it; None for that of the source. Tensors that a model keeps in float32 stay so."""
    processes: int = 1
    resume: bool = False
    check: bool = True
    """Read every file back when it is written and compare it with the checksums of what was written."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a conversion writes."""

    out: Path
    num_tensors: int
    files: Mapping[str, int]
    """Name -> tensor bytes."""
    largest_bytes: int
    """Of the largest tensor that is held whole."""
    copies_held: int
    """How many times that a process holds at most, besides what Python and the libraries take."""

    @property
    def nbytes(self) -> int:
        return sum(self.files.values())

    def describe(self, processes: int) -> str:
        """Lines for a terminal."""
        peak = self.copies_held * self.largest_bytes * processes
        begun = f", continuing {partial_path(self.out)}" if partial_path(self.out).exists() else ""
        return (
            f"{self.out}: {self.num_tensors} tensors, {show_bytes(self.nbytes)} in {len(self.files)} files{begun}\n"
            f"the largest tensor held has {show_bytes(self.largest_bytes)}; {processes} processes hold at most "
            f"{self.copies_held} such each, {show_bytes(peak)}"
        )


def refuse_existing(out: Path) -> None:
    """Before anything is computed; the output folder looks again."""
    if out.exists():
        raise ValueError(f"{out} exists; it is not overwritten")


def record_file(partial: Path, name: str) -> Path:
    """Of the output file `name`."""
    return partial / RECORDS / f"{name}.json"


def due_files(partial: Path, names: Sequence[str]) -> list[str]:
    """Those that are not whole yet."""
    return [name for name in names if not (record_file(partial, name).exists() and (partial / name).exists())]


def run_plan(
    convert: Callable[[dict[str, Any], Advance], None],
    plan: Plan,
    files: Mapping[str, Any],
    partial: Path,
    options: Options,
) -> None:
    """Have processes write the files and check them, each its part.

    Args:
        convert: writes those of its files that are not whole yet, then checks all of them.
        files: name -> what is in it.
    """
    (partial / RECORDS).mkdir(exist_ok=True)
    nbytes = sum(plan.files[name] for name in due_files(partial, list(files)))
    check_space(partial, nbytes)
    parts = [{name: files[name] for name in names} for names in divide(plan.files, options.processes)]
    title = "convert and check" if options.check else "convert"
    with byte_progress(title, nbytes + (plan.nbytes if options.check else 0)) as advance:
        run_workers(convert, parts, advance)


def on_disk(file: Path) -> None:
    """Wait until a written file is on the disk. Read back afterwards, it may come from the memory of the system."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Finisher:
    """Waits for written files to reach the disk, checks them and writes their records, while the next one is made.

    A context manager, which waits for the last file. One file at a time is waited for, so that the memory of the system
    does not fill with what is not on the disk yet.

    Raises:
        OSError: the disk failed; from the call after, or at the end.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._last: Future[None] | None = None

    def add(self, file: Path, finish: Callable[[], None]) -> None:
        """`file` is written; `finish` is called, in a thread, when it is on the disk."""
        self._wait()
        self._last = self._thread.submit(_finish, file, finish)

    def _wait(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def __enter__(self) -> "Finisher":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._wait()
        finally:
            self._thread.shutdown()


def _finish(file: Path, finish: Callable[[], None]) -> None:
    on_disk(file)
    finish()
