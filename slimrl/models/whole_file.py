"""A file that has its name only when it is whole."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, cast

WRITE_BYTES = 256 * 1024
"""Written at a time. Of writes of several MB the system takes about twice as long per byte, since it then keeps the
file in larger pages of memory, which it has to find first; with smaller ones threads wait for Python's lock more
often."""


@contextmanager
def whole_file(file: Path, buffering: int = -1) -> Iterator[BinaryIO]:
    """Write under a temporary name beside `file`; renamed at the end of the block, removed where the block fails.

    What is written can be read back meanwhile.

    Args:
        buffering: as `open` takes it; 0 for writes past the stream, to its descriptor.

    Raises:
        OSError: the disk is full, or writing failed; it names the file.
    """
    partial = file.with_name(f".{file.name}.partial")
    try:
        with partial.open("w+b", buffering=buffering) as stream:
            yield cast(BinaryIO, stream)
        partial.replace(file)
    except OSError as error:
        reason = "no space left on the disk" if error.errno == errno.ENOSPC else error.strerror
        raise OSError(error.errno, f"could not be written: {reason}", str(file)) from error
    finally:
        with suppress(FileNotFoundError):
            partial.unlink()
