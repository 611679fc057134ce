"""What both directions of `convert` share: options, the plan that is told before anything is written, and records.

A record says what one output file holds, with a checksum of every tensor. It is written when the file is whole, on the
disk and checked, so it is also what an interrupted conversion goes by when it continues.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimrl_tools.output_folder import check_space, partial_path
from slimrl_tools.progress import Advance, byte_progress
from slimrl_tools.terminal import counted, show_bytes
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
        peak = show_bytes(self.copies_held * self.largest_bytes * processes)
        hold, each = ("holds", "") if processes == 1 else ("hold", " each")
        return (
            f"{describe_output(self.out, self.num_tensors, self.nbytes, len(self.files))}\n"
            f"the largest tensor held has {show_bytes(self.largest_bytes)}; {counted(processes, 'process')} {hold} "
            f"at most {self.copies_held} such{each}, {peak}"
        )


def describe_output(out: Path, num_tensors: int, nbytes: int, num_files: int) -> str:
    """A line that says what is to be written, and whether an interrupted run has begun it."""
    begun = f", continuing {partial_path(out)}" if partial_path(out).exists() else ""
    return f"{out}: {counted(num_tensors, 'tensor')}, {show_bytes(nbytes)} in {counted(num_files, 'file')}{begun}"


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
