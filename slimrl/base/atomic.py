"""Files and folders that appear under their final name only when complete.

Standard library alone, and Python 3.9: the batch host of a job uses this too.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, cast

WRITE_BYTES = 256 * 1024
"""Size of one write. Writes of several MB take about twice as long per byte, since the kernel then has to find larger
pages for the page cache; with smaller writes threads wait for Python's lock more often."""


FULL = (errno.ENOSPC, errno.EDQUOT)
"""Numbers of errors by which a disk says that it takes no more"""


@contextmanager
def atomic_file(file: Path, buffering: int = -1) -> Iterator[BinaryIO]:
    """Write under a temporary name next to `file`; renamed at the end of the block, removed if the block fails.

    The stream can be read too.

    Args:
        buffering: as of `open`; 0 for writes to the file descriptor.

    Raises:
        OSError: the disk is full, or writing failed; names the file.
    """
    partial = file.with_name(f".{file.name}.partial")
    try:
        with partial.open("w+b", buffering=buffering) as stream:
            yield cast(BinaryIO, stream)
        partial.replace(file)
    except OSError as error:
        raise OSError(error.errno, f"could not be written: {disk_reason(error)}", str(file)) from error
    finally:
        with suppress(FileNotFoundError):
            partial.unlink()


def disk_reason(error: OSError) -> str | None:
    """The system's error message, in plain words if the disk is full."""
    return "no space left on the disk" if error.errno in FULL else error.strerror


def write_whole(file: Path, text: str) -> None:
    """Write a text file as `atomic_file` does."""
    with atomic_file(file) as stream:
        stream.write(text.encode())


@contextmanager
def atomic_folder(out: Path) -> Iterator[Path]:
    """A new folder next to `out` to write into; renamed at the end of the block, removed if the block fails.

    Raises:
        ValueError: `out` exists.
    """
    if out.exists():
        raise ValueError(f"{out} exists; it is not overwritten")
    out = out.absolute()
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
