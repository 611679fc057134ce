"""Imports without garbage collection."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def imports_uncollected() -> Iterator[None]:
    """Import without garbage collection in the block: a process's imports make half a million objects that stay until
    its end.

    Collections would walk them during the imports, a fifth of their time, later, and when Python exits. So there are
    none in the block, and later ones skip these objects.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collecting:
            gc.enable()
