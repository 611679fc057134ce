"""The output folder of a long conversion, which can be interrupted and resumed.

1. The output is written to `.OUT.partial` beside OUT, together with a file that describes the job.
2. At the end it is renamed to OUT.
3. When the job is interrupted, its finished files stay. `--resume` continues the same job: the same command, options
   and source files. A job that finished no file leaves nothing.
"""

import errno
import fcntl
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slimrl.base.atomic import write_whole
from slimrl.observability.units import show_bytes

JOB_NAME = ".job.json"
_LOCK_NAME = ".lock"
NAMES = {
    **dict.fromkeys(("file_bytes", "shard_bytes"), "--shard-gb"),
    **dict.fromkeys(("source", "sources"), "the source"),
    "hf_dir": "--hf",
    "dtype": "--dtype",
    "layout": "the layout",
    "command": "the command",
    **{name: f"--{name.replace('_', '-')}" for name in ("block", "not_convert", "weights", "layers", "format")},
}
"""What a job depends on, as its user gives it"""

RECORDS = ".records"
"""Folder of an unfinished output, with a record of each finished file."""

CHECKED_SUFFIXES = (".safetensors", ".json", ".distcp", ".metadata")
"""Suffixes of the source files whose size and modification time identify a job."""


@contextmanager
def output_folder(out: Path, job: dict[str, Any], *, resume: bool) -> Iterator[Path]:
    """The temporary folder to write into; renamed to `out` when the block ends without an error.

    Args:
        out: must not exist.
        job: everything that the output depends on, as JSON.
        resume: continue an interrupted run of the same job, if there is one.

    Raises:
        ValueError: `out` exists, or its parent does not; an interrupted run is there and `resume` is not set; it was
            another job; another process is writing it.
    """
    check_new(out)
    partial = partial_path(out)
    if partial.exists() and not resume:
        raise ValueError(f"{partial}: left by an interrupted run; continue it with --resume, or remove the folder")
    (partial / RECORDS).mkdir(parents=True, exist_ok=True)
    with _locked(partial):
        _check_job(partial, job)
        try:
            yield partial
        except BaseException as error:
            if finished(partial):
                error.add_note(f"Finished files are in {partial}; --resume continues from there.")
            else:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        if out.exists():
            raise ValueError(f"{out} was created by something else meanwhile; the output stays in {partial}")
        (partial / _LOCK_NAME).unlink()
        shutil.rmtree(partial / RECORDS)
        partial.rename(out)
        (out / JOB_NAME).unlink()


def check_new(out: Path) -> None:
    """Raises ValueError if the output exists, or the folder that is to hold it does not: behind a misspelt mount there
    is another disk. Called before anything is computed, and by `output_folder`."""
    if out.exists():
        raise ValueError(f"{out} exists; it is not overwritten")
    if not out.absolute().parent.is_dir():
        raise ValueError(f"{out}: there is no folder {out.absolute().parent}; make it first")


def partial_path(out: Path) -> Path:
    """Folder of an unfinished output."""
    return out.absolute().with_name(f".{out.absolute().name}.partial")


def finished(partial: Path) -> list[str]:
    """Names of finished files; unfinished ones have names that begin with a dot."""
    return sorted(file.name for file in partial.iterdir() if not file.name.startswith("."))


def source_files(src: Path) -> dict[str, list[int]]:
    """Name -> [bytes, modification time in ns] of a checkpoint's files, or of one file, for a job."""
    files = [file for file in sorted(src.iterdir()) if file.name.endswith(CHECKED_SUFFIXES)] if src.is_dir() else [src]
    stats = {file.name: file.stat() for file in files}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}


def check_space(out: Path, nbytes: int) -> None:
    """Raises OSError if the disk of `out` has less than `nbytes` free."""
    folder = next(parent for parent in out.absolute().parents if parent.exists())
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise OSError(errno.ENOSPC, f"needs {show_bytes(nbytes)}, {show_bytes(free)} are free", str(folder))


@contextmanager
def _locked(partial: Path) -> Iterator[None]:
    with (partial / _LOCK_NAME).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{partial}: another process is writing it") from None
        yield


def _check_job(partial: Path, job: dict[str, Any]) -> None:
    """Write the job into a new folder; raise ValueError if an existing folder is of another job."""
    file = partial / JOB_NAME
    if not file.exists():
        write_whole(file, json.dumps(job, indent=2) + "\n")
        return
    before = json.loads(file.read_text())
    now = json.loads(json.dumps(job))
    different = sorted(NAMES.get(key, key) for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    if different:
        verb = "differs" if len(different) == 1 else "differ"
        raise ValueError(
            f"{partial}: left by another job ({', '.join(different)} {verb}); finish that job, or remove the folder"
        )
