"""Memory of all processes that this one has started, those that they started included."""

from contextlib import suppress

import psutil

INTERVAL_S = 2.0
"""Seconds between two looks of a watch, each of which reads the page tables of all processes"""


def children_bytes() -> int:
    """The sum of their proportional set sizes now (smaps_rollup, proc(5)): a page that several processes share counts
    once."""
    total = 0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # It has ended, or belongs to another user.
            total += process.memory_full_info().pss
    return total
