"""What the writers of versions share: buckets in, a manifest out, hashed and worked on block by block.

A tensor may come in parts, its rows in ascending order. A few threads work on a few blocks at a time, and no more than
these are held besides the bucket.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import xxhash

from slimrl.data.protocols import BucketSpec, TensorPart, TensorSpec, num_rows
from slimrl.models.versions.blocks import MAX_WORKERS, block_ranges
from slimrl.models.versions.manifest import Manifest

T = TypeVar("T")
R = TypeVar("R")


class VersionWriter(Protocol):
    """Raises OSError from every method: the disk is full, or writing failed."""

    @property
    def changed_fraction(self) -> float | None:
        """Of all elements that came, against the base; None for a version without one."""
        ...

    def write(self, bucket: BucketSpec, data: np.ndarray) -> None:
        """Take a bucket; `data`, uint8 [bucket.nbytes], may change when this returns."""
        ...

    def finish(self) -> Manifest:
        """Everything is on the disk, the manifest last."""
        ...

    def close(self) -> None:
        """Let go of files and threads, after `finish` or instead of it."""
        ...


@dataclass(frozen=True)
class TensorBlock:
    """At most BLOCK_BYTES of a tensor."""

    spec: TensorSpec
    start: int
    """Its first byte within the tensor."""
    data: np.ndarray
    """uint8"""


class TensorHashes:
    """XXH3-64 of tensors whose rows come in ascending order, in any number of parts."""

    def __init__(self) -> None:
        self._states: dict[str, tuple[xxhash.xxh3_64, int]] = {}
        self._digests: dict[str, str] = {}

    def update(self, part: TensorPart, data: np.ndarray) -> None:
        name = part.spec.name
        state, rows = self._states.pop(name, (xxhash.xxh3_64(), 0))
        assert part.start == rows, f"{name}: row {part.start} came where {rows} was due"
        state.update(data.data)
        if part.stop == num_rows(part.spec):
            self._digests[name] = state.hexdigest()
        else:
            self._states[name] = state, part.stop

    def digest(self, name: str) -> str:
        """16 hexadecimal digits, of a tensor that has come whole."""
        return self._digests[name]


def hashed_blocks(bucket: BucketSpec, data: np.ndarray, hashes: TensorHashes) -> Iterator[TensorBlock]:
    """The bucket's bytes, block by block; each part is hashed before its blocks come."""
    for part in bucket.parts:
        value = data[part.offset : part.offset + part.nbytes]
        hashes.update(part, value)
        first = part.start * (part.nbytes // (part.stop - part.start)) if part.start else 0
        for start, stop in block_ranges(part.nbytes):
            yield TensorBlock(part.spec, first + start, value[start:stop])


def in_order(pool: ThreadPoolExecutor, call: Callable[[T], R], items: Iterable[T]) -> Iterator[tuple[T, R]]:
    """(item, result) in the order of the items, computed by the pool at most a few ahead of who takes them."""
    pending: deque[tuple[T, Future[R]]] = deque()
    try:
        for item in items:
            pending.append((item, pool.submit(call, item)))
            if len(pending) > 2 * MAX_WORKERS:
                first, future = pending.popleft()
                yield first, future.result()
        while pending:
            first, future = pending.popleft()
            yield first, future.result()
    finally:
        # After an error nobody works on the items' memory any more.
        for _, future in pending:
            if not future.cancel():
                future.exception()


def sync_and_close(descriptor: int) -> None:
    """Raises OSError: what was written did not reach the disk."""
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
