"""A folder that has its name only when it is whole."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """A new folder beside `out` to write into; renamed at the end of the block, removed where the block fails.

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
