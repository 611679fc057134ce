"""Items of an iterator made in a thread, one ahead of their use."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Item = TypeVar("Item")

_END: Any = object()


def read_ahead(items: Iterator[Item]) -> Iterator[Item]:
    """The same items, each made while the one before is in use, and none further ahead.

    Reading, writing and torch's operations let other threads run, so that the two overlap. What the iterator raises
    comes in its place. Where the items are left before their end, the one that is being made is waited for.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="read-ahead") as thread:
        coming = thread.submit(next, items, _END)
        while (item := coming.result()) is not _END:
            coming = thread.submit(next, items, _END)
            yield item
            # Gone before the one after the next is made.
            del item
