"""Imports without garbage collection."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def imports_uncollected() -> Iterator[None]:
    """For the imports of a command, which make half a million objects that stay until the end.

    Collections would walk through them while they are made, after that, and once more when Python ends: a quarter of
    what a command takes to start and end. So there are none meanwhile, and later ones leave these objects alone.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collecting:
            gc.enable()
