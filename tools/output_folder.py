"""The folder that a long conversion writes: complete under its name, or under a temporary name and to be continued.

1. The output is written to `.OUT.partial` beside OUT, together with a file that says which job it is.
2. At the end it is renamed to OUT.
3. When the job is interrupted, what it finished stays there. `--resume` continues it, if it is the same job: the same
   command, options and source files. A job that finished nothing leaves nothing.
"""

import errno
import fcntl
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

JOB_NAME = ".job.json"
_LOCK_NAME = ".lock"

CHECKED_SUFFIXES = (".safetensors", ".json", ".distcp", ".metadata")
"""Files of a source whose size and time of change belong to a job."""


@contextmanager
def output_folder(out: Path, job: dict[str, Any], *, resume: bool) -> Iterator[Path]:
    """The temporary folder to write into; renamed to `out` when the block ends without an error.

    Args:
        out: must not exist.
        job: what the output depends on, as JSON; the same on a resume.
        resume: continue what an interrupted run of the same job left, where it left something.

    Raises:
        ValueError: `out` exists; an interrupted run left something and `resume` is not set, or was another job; another
            process is writing it.
    """
    refuse_existing(out)
    partial = partial_path(out)
    if partial.exists() and not resume:
        raise ValueError(f"{partial}: left by an interrupted run; continue it with --resume, or remove it")
    partial.mkdir(parents=True, exist_ok=True)
    with _locked(partial):
        _check_job(partial, job)
        try:
            yield partial
        except BaseException as error:
            if finished(partial):
                error.add_note(f"What is finished lies in {partial}; --resume continues from there.")
            else:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        if out.exists():
            raise ValueError(f"{out} has come into being meanwhile; the output stays in {partial}")
        (partial / _LOCK_NAME).unlink()
        partial.rename(out)
        (out / JOB_NAME).unlink()


def refuse_existing(out: Path) -> None:
    """Before anything is computed; the output folder looks again."""
    if out.exists():
        raise ValueError(f"{out} exists; it is not overwritten")


def partial_path(out: Path) -> Path:
    """Where an output lies until it is whole."""
    return out.absolute().with_name(f".{out.absolute().name}.partial")


def finished(partial: Path) -> list[str]:
    """Names of the files that are whole already; those that were being written have names with a dot in front."""
    return sorted(file.name for file in partial.iterdir() if not file.name.startswith("."))


def source_files(src: Path) -> dict[str, list[int]]:
    """Name -> [bytes, time of change in ns] of the files that make a checkpoint folder, for a job."""
    stats = {file.name: file.stat() for file in sorted(src.iterdir()) if file.name.endswith(CHECKED_SUFFIXES)}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}


def check_space(out: Path, nbytes: int) -> None:
    """Raises OSError if the disk that `out` is to lie on has less than `nbytes` free."""
    folder = next(parent for parent in out.absolute().parents if parent.exists())
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise OSError(errno.ENOSPC, f"needs {nbytes / 1e9:.1f} GB, {free / 1e9:.1f} GB are free", str(folder))


@contextmanager
def _locked(partial: Path) -> Iterator[None]:
    with (partial / _LOCK_NAME).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{partial}: another process is writing it") from None
        yield


def _check_job(partial: Path, job: dict[str, Any]) -> None:
    """Write the job into a new folder, compare it with that of an old one."""
    file = partial / JOB_NAME
    if not file.exists():
        new = file.with_suffix(".new")
        new.write_text(json.dumps(job, indent=2) + "\n")
        new.replace(file)
        return
    before = json.loads(file.read_text())
    now = json.loads(json.dumps(job))
    different = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    if different:
        raise ValueError(
            f"{partial}: left by another job ({', '.join(different)} differ); finish that one, or remove the folder"
        )
