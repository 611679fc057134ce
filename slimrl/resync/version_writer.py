"""Common parts of the writers of versions. They take buckets, hash and write them block by block, and give a manifest.

A tensor may come in parts, its rows in ascending order. A few threads work on a few blocks at a time; no other memory
is held besides the bucket.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from slimrl.checkpoints.versions.codec import MAX_WORKERS, block_ranges, num_workers
from slimrl.checkpoints.versions.directory import sync_and_close
from slimrl.checkpoints.versions.manifest import Frame, Manifest, StoredTensor, VersionRef, write_manifest
from slimrl.config.schema.resync import DeltaEncoding
from slimrl.data.weights import TensorPart, TensorSpec, num_rows


@dataclass(frozen=True)
class TensorBlock:
    """A block of a tensor, at most BLOCK_BYTES."""

    spec: TensorSpec
    start: int
    """Offset of the block's first byte within the tensor."""
    data: np.ndarray
    """uint8, bytes of the block"""


class VersionWriter:
    """Raises OSError from every method: the disk is full, or writing failed.

    Args:
        folder: new and empty.
        specs: all tensors that will come, in order.
    """

    changed_fraction: float | None = None
    """Fraction of all elements that changed since the base, when the version is finished; None for a version without a
    base."""

    def __init__(self, folder: Path, ref: VersionRef, specs: Sequence[TensorSpec]) -> None:
        self._folder, self._ref, self._specs = folder, ref, specs
        self._hashing: dict[str, tuple[xxhash.xxh3_64, int]] = {}
        """Hash so far and next row of each tensor of which not all rows have come"""
        self._hashes: dict[str, str] = {}
        self._pool = ThreadPoolExecutor(num_workers())
        self._syncs: list[Future[None]] = []

    def write(self, parts: Sequence[TensorPart], data: np.ndarray) -> None:
        """Take a bucket; `data`, uint8, may change when this returns."""
        raise NotImplementedError

    def finish(self) -> Manifest:
        """Bring everything to the disk, the manifest last."""
        raise NotImplementedError

    def close(self) -> None:
        """Release files and threads, after `finish` or instead of it."""
        # Each sync that is running or queued closes its file.
        self._pool.shutdown()

    def _hashed_blocks(self, parts: Sequence[TensorPart], data: np.ndarray) -> Iterator[TensorBlock]:
        """The bucket's bytes, block by block; hashes each part before its blocks."""
        for part in parts:
            value, name = data[part.offset : part.offset + part.nbytes], part.spec.name
            state, rows = self._hashing.pop(name, (xxhash.xxh3_64(), 0))
            assert part.start == rows, f"{name}: row {part.start} came instead of {rows}"
            state.update(value.data)
            if part.stop == num_rows(part.spec):
                self._hashes[name] = state.hexdigest()
            else:
                self._hashing[name] = state, part.stop
            first = part.start * (part.nbytes // (part.stop - part.start)) if part.start else 0
            for start, stop in block_ranges(part.nbytes):
                yield TensorBlock(part.spec, first + start, value[start:stop])

    def _sync_in_background(self, descriptor: int) -> None:
        """Sync and close a file, so that the disk works while the next bucket is gathered."""
        self._syncs.append(self._pool.submit(sync_and_close, descriptor))

    def _write_manifest(
        self,
        files: Mapping[str, int],
        frames: Mapping[str, Sequence[Frame]],
        *,
        base: VersionRef | None = None,
        encoding: DeltaEncoding | None = None,
    ) -> Manifest:
        for sync in self._syncs:
            sync.result()
        tensors = {
            spec.name: StoredTensor(spec=spec, xxh3=self._hashes[spec.name], frames=tuple(frames.get(spec.name, ())))
            for spec in self._specs
        }
        manifest = Manifest(ref=self._ref, base=base, encoding=encoding, files=files, tensors=tensors)
        write_manifest(self._folder, manifest)
        return manifest


def in_order[T, R](pool: ThreadPoolExecutor, call: Callable[[T], R], items: Iterable[T]) -> Iterator[tuple[T, R]]:
    """(item, result) in the order of the items; the pool computes at most a few ahead of the caller."""
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
        # After an error no thread may still work on the items' memory.
        for _, future in pending:
            if not future.cancel():
                future.exception()
