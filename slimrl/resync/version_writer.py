"""Writers of versions on a disk, whole or as changes. They take buckets, hash and write them block by block, and give a
manifest.

A tensor may come in parts, its rows in ascending order. A few threads work on a few blocks at a time; no other memory
is held besides the bucket.
"""

import os
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path

import numpy as np
import xxhash

from slimrl.checkpoints.other_files import copy_other_files
from slimrl.checkpoints.safetensors_file import element_bytes, file_layout, spec_bytes, write_at
from slimrl.checkpoints.safetensors_folder import plan_safetensors_files, write_index
from slimrl.checkpoints.tensor_bytes import fill
from slimrl.checkpoints.versions.codec import MAX_WORKERS, BlockCodec, block_ranges, num_workers
from slimrl.checkpoints.versions.directory import sync_and_close
from slimrl.checkpoints.versions.manifest import Frame, Manifest, StoredTensor, VersionRef, write_manifest
from slimrl.config.schema.resync import DeltaEncoding
from slimrl.data.model_weights import TensorPart, TensorSpec, num_rows
from slimrl.models.hf_config import plain_config, read_hf_config, write_hf_config
from slimrl.quantization.fp8 import FP8_DTYPE


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


class LastVersion:
    """All tensors one after the other in an unlinked file, which the kernel removes when the process ends.

    Its pages are page cache, so it takes no memory that anything else needs.

    Raises:
        OSError: the folder's disk has no room for it.
    """

    def __init__(self, folder: Path, specs: Sequence[TensorSpec]) -> None:
        self._folder = folder
        *starts, end = accumulate(map(spec_bytes, specs), initial=0)
        self._starts = {spec.name: start for spec, start in zip(specs, starts, strict=True)}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - see close
            with ExitStack() as if_full:
                if_full.callback(self._file.close)
                os.posix_fallocate(self._file.fileno(), 0, end)
                if_full.pop_all()
        except OSError as error:
            raise OSError(error.errno, f"resync.local_dir: {error.strerror}", str(folder)) from error

    def read(self, name: str, start: int, out: np.ndarray) -> None:
        """Fill `out`, uint8, with a tensor's bytes from `start` on."""
        fill(self._file.fileno(), self._folder, out.data, self._starts[name] + start)

    def write(self, name: str, start: int, data: np.ndarray) -> None:
        write_at(self._file.fileno(), data.data, self._starts[name] + start)

    def close(self) -> None:
        self._file.close()


class WholeWriter(VersionWriter):
    """
    Args:
        model_dir: checkpoint whose configuration, tokenizer and code go with the weights.
        file_bytes: most bytes of one file; a larger tensor gets a file of its own.
        last_version: gets the tensors too; None if no delta will follow.
    """

    def __init__(
        self,
        folder: Path,
        ref: VersionRef,
        specs: Sequence[TensorSpec],
        model_dir: Path,
        *,
        file_bytes: int,
        last_version: LastVersion | None,
    ) -> None:
        super().__init__(folder, ref, specs)
        self._model_dir, self._last_version = model_dir, last_version
        self._files = plan_safetensors_files(specs, file_bytes)
        self._file_of = {spec.name: name for name, group in self._files.items() for spec in group}
        self._missing = {name: sum(map(spec_bytes, group)) for name, group in self._files.items()}
        self._open: dict[str, tuple[int, dict[str, int]]] = {}

    def write(self, parts: Sequence[TensorPart], data: np.ndarray) -> None:
        for part in parts:
            self._create(self._file_of[part.spec.name])
        for _ in in_order(self._pool, self._write_block, self._hashed_blocks(parts, data)):
            pass
        for part in parts:
            self._missing[self._file_of[part.spec.name]] -= part.nbytes
        for name in {self._file_of[part.spec.name] for part in parts}:
            if not self._missing[name]:
                self._sync_in_background(self._open.pop(name)[0])

    def finish(self) -> Manifest:
        for name, missing in self._missing.items():
            assert not missing, f"{name}: {missing} bytes never came"
        self._write_other_files()
        return self._write_manifest({file.name: file.stat().st_size for file in sorted(self._folder.iterdir())}, {})

    def close(self) -> None:
        super().close()
        for descriptor, _ in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def _create(self, name: str) -> None:
        """A file with its header, unless it is there already."""
        if name not in self._open:
            header, offsets = file_layout(self._files[name])
            descriptor = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            self._open[name] = descriptor, offsets
            write_at(descriptor, memoryview(header), 0)

    def _write_block(self, block: TensorBlock) -> None:
        descriptor, offsets = self._open[self._file_of[block.spec.name]]
        write_at(descriptor, block.data.data, offsets[block.spec.name] + block.start)
        if self._last_version is not None:
            self._last_version.write(block.spec.name, block.start, block.data)

    def _write_other_files(self) -> None:
        write_index(self._folder, self._files)
        config = read_hf_config(self._model_dir)
        if not any(spec.dtype == FP8_DTYPE for spec in self._specs):
            config = plain_config(config, _common_dtype(self._specs))
        write_hf_config(self._folder, config)
        copy_other_files(self._model_dir, self._folder)
        for file in self._folder.iterdir():
            if file.name not in self._files:
                sync_and_close(os.open(file, os.O_RDONLY))


class DeltaWriter(VersionWriter):
    """Writes frames of blocks that changed, one file per bucket that has any.

    Args:
        base: the version that `last_version` holds. Afterwards it holds the new one; after an error, a mixture.
    """

    def __init__(
        self,
        folder: Path,
        ref: VersionRef,
        base: VersionRef,
        specs: Sequence[TensorSpec],
        *,
        last_version: LastVersion,
        encoding: DeltaEncoding,
    ) -> None:
        super().__init__(folder, ref, specs)
        self._base, self._last_version, self._encoding = base, last_version, encoding
        self._codec = BlockCodec(encoding)
        self._changed_elements = 0
        self._frames: dict[str, list[Frame]] = {spec.name: [] for spec in specs}
        self._files: dict[str, int] = {}

    def write(self, parts: Sequence[TensorPart], data: np.ndarray) -> None:
        name, end, descriptor = f"changed-{len(self._files) + 1:05d}.zst", 0, -1
        try:
            for block, (frame, changed) in in_order(self._pool, self._encode, self._hashed_blocks(parts, data)):
                if frame is None:
                    continue
                self._changed_elements += changed
                if descriptor < 0:
                    descriptor = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
                write_at(descriptor, memoryview(frame), end)
                stop = block.start + len(block.data)
                self._frames[block.spec.name].append(
                    Frame(file=name, offset=end, nbytes=len(frame), start=block.start, stop=stop)
                )
                end += len(frame)
        except BaseException:
            if descriptor >= 0:
                os.close(descriptor)
            raise
        if descriptor >= 0:
            self._files[name] = end
            self._sync_in_background(descriptor)

    def finish(self) -> Manifest:
        self.changed_fraction = self._changed_elements / max(1, sum(prod(spec.shape) for spec in self._specs))
        return self._write_manifest(self._files, self._frames, base=self._base, encoding=self._encoding)

    def _encode(self, block: TensorBlock) -> tuple[bytes | None, int]:
        """(frame of the block's changes, None if there are none; elements that changed); updates `last_version`."""
        old = self._codec.buffer[: len(block.data)]
        self._last_version.read(block.spec.name, block.start, old)
        frame = self._codec.encode(old, block.data, element_bytes(block.spec.dtype))
        if frame is not None:
            self._last_version.write(block.spec.name, block.start, block.data)
        return frame, self._codec.changed_elements


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


def _common_dtype(specs: Sequence[TensorSpec]) -> str:
    """Dtype of most of the bytes: expert biases may be float32 where the weights are bfloat16."""
    nbytes: Counter[str] = Counter()
    for spec in specs:
        nbytes[spec.dtype] += spec_bytes(spec)
    return nbytes.most_common(1)[0][0]
