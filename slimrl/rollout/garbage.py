"""The garbage collector while thousands of episodes are under way.

By its defaults it runs after every 700 new objects, and looks at all objects of the process whenever their number has
grown by a quarter: a third of the CPU time of 5,000 episodes, which leave hardly any cycles.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (50_000, 20, 10)
"""Thresholds of the garbage collector's generations, for gc.set_threshold"""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collect rarely, and never what exists already, such as modules, afterwards neither: once for a process's work."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
