"""Common to all commands that write a checkpoint: the printed plan, files written in parallel, and records.

A record lists the tensors of one output file with their checksums. It is written when the file is whole, on the disk
and checked; `--resume` keeps the files that have one.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial as bind
from pathlib import Path
from typing import Any

from slimrl_tools.convert.flush_and_verify import FlushAndVerify
from slimrl_tools.convert.output_folder import RECORDS, check_space, partial_path
from slimrl_tools.convert.workers import divide, run_workers
from slimrl_tools.progress import Advance, byte_progress

from slimrl.base.atomic import write_whole
from slimrl.checkpoints.digests import Span, check_spans
from slimrl.checkpoints.safetensors_file import read_header
from slimrl.observability.units import counted, show_bytes

Say = Callable[[str], None]
"""Prints a line."""

Written = Callable[[int, Span], None]
"""Called after each tensor with the file's descriptor, open for reading and writing, and the tensor's span."""

type WriteFile[Contents] = Callable[[Path, Contents, Written], None]
"""Writes one file."""

COPIES_HELD = 3
"""Largest tensors that a process of a conversion holds at a time, besides what Python and the libraries take."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a conversion writes."""

    out: Path
    num_tensors: int
    files: Mapping[str, int]
    """Name -> tensor bytes."""
    largest_bytes: int
    """Size of the largest tensor that a process holds whole."""

    def describe(self, processes: int) -> str:
        """Lines for a terminal."""
        peak = show_bytes(COPIES_HELD * self.largest_bytes * processes)
        hold, each = ("holds", "") if processes == 1 else ("hold", " each")
        return (
            f"{describe_output(self.out, self.num_tensors, self.files)}\n"
            f"the largest tensor held has {show_bytes(self.largest_bytes)}; {counted(processes, 'process')} {hold} "
            f"at most {COPIES_HELD} of this size{each}, {peak}"
        )


def describe_output(out: Path, num_tensors: int, files: Mapping[str, int]) -> str:
    """A line on the output, and whether it continues an interrupted run. `files`: name -> tensor bytes."""
    begun = f", continuing {partial_path(out)}" if partial_path(out).exists() else ""
    size = show_bytes(sum(files.values()))
    return f"{out}: {counted(num_tensors, 'tensor')}, {size} in {counted(len(files), 'file')}{begun}"


def write_in_parallel[Contents](
    opened: Callable[[], AbstractContextManager[WriteFile[Contents]]],
    files: Mapping[str, Contents],
    sizes: Mapping[str, int],
    partial: Path,
    *,
    title: str,
    processes: int = 1,
    check: bool,
) -> None:
    """Divide the files of an unfinished output among processes, and show their progress.

    Args:
        opened: what each process writes with; can be pickled if there are several.
        files: name -> its contents.
        sizes: name -> tensor bytes.
        title: of the progress bar.
        check: read back all files, those of an earlier run first.
    """
    nbytes = sum(sizes[name] for name in _unfinished(partial, files))
    check_space(partial, nbytes)
    parts = [{name: files[name] for name in names} for names in divide(sizes, processes)]
    if check:
        title, nbytes = f"{title} and check", nbytes + sum(sizes.values())
    with byte_progress(title, nbytes) as advance:
        run_workers(bind(write_files, opened, partial, check), parts, advance)


def write_files[Contents](
    opened: Callable[[], AbstractContextManager[WriteFile[Contents]]],
    partial: Path,
    check: bool,
    files: Mapping[str, Contents],
    advance: Advance,
) -> None:
    """Write the unfinished ones of these files, check and record them; see `write_in_parallel`."""
    unfinished = _unfinished(partial, files)
    with opened() as write, FlushAndVerify(advance if check else None) as flush_and_verify:
        for name in files.keys() - unfinished if check else ():
            _check_again(partial, name, advance)
        for name in unfinished:
            file, spans = partial / name, list[Span]()
            write(file, files[name], bind(_written, file, spans, flush_and_verify, advance))
            flush_and_verify.finish(file, bind(write_record, partial, name, spans))


def _written(
    file: Path, spans: list[Span], flush_and_verify: FlushAndVerify, advance: Advance, descriptor: int, span: Span
) -> None:
    spans.append(span)
    flush_and_verify.written(descriptor, file, span)
    advance(span.length)


def write_record(partial: Path, name: str, spans: Sequence[Span]) -> None:
    write_whole(_record(partial, name), json.dumps([asdict(span) for span in spans]))


def read_record(partial: Path, name: str) -> list[Span]:
    """The tensors of an output file, in the order in which they were written."""
    return [Span(**span) for span in json.loads(_record(partial, name).read_text())]


def _record(partial: Path, name: str) -> Path:
    return partial / RECORDS / f"{name}.json"


def _unfinished(partial: Path, names: Mapping[str, Any]) -> list[str]:
    return [name for name in names if not (_record(partial, name).exists() and (partial / name).exists())]


def _check_again(partial: Path, name: str, advance: Advance) -> None:
    """Check a file of an earlier run; if it has changed, its record is removed, so that the next run rewrites it."""
    file = partial / name
    try:
        if file.suffix == ".safetensors":
            # Spans do not cover the header.
            read_header(file)
        with file.open("rb", buffering=0) as stream:
            check_spans(stream.fileno(), file, read_record(partial, name), advance)
    except (OSError, ValueError):
        _record(partial, name).unlink()
        raise
