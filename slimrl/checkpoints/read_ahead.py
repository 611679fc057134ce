"""Prefetches the next item of an iterator in a thread."""

from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_END: Any = object()


def read_ahead[Item](items: Iterator[Item]) -> Generator[Item]:
    """The same items; a thread makes the next one, and no more, while one is in use.

    Reading, writing and torch's operations release the GIL, so that the two overlap. An exception of the iterator is
    raised in its place. A consumer that stops early waits for the item that is being made.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="read-ahead") as thread:
        following = thread.submit(next, items, _END)
        while (item := following.result()) is not _END:
            following = thread.submit(next, items, _END)
            yield item
            # Freed before the item after the next is made.
            del item
