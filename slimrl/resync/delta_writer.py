"""A version written as what changed against the last one, which the sender has in its mirror."""

import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from pathlib import Path

import numpy as np

from slimrl.config.schema import DeltaEncoding
from slimrl.data.protocols import BucketSpec, TensorSpec
from slimrl.models.safetensors_file import element_bytes, write_at
from slimrl.models.versions.blocks import num_workers
from slimrl.models.versions.codec import BLOCK_BYTES, BlockCodec
from slimrl.models.versions.manifest import Block, Manifest, StoredTensor, VersionRef, write_manifest
from slimrl.resync.mirror import Mirror
from slimrl.resync.version_writer import TensorBlock, TensorHashes, hashed_blocks, in_order, sync_and_close


class DeltaWriter:
    """Implements VersionWriter: frames of blocks that changed, one file per bucket that has any.

    Args:
        folder: new and empty.
        base: the version that the mirror holds; afterwards, or after an error, it holds the new one, or a part of it.
        specs: all tensors that will come, in order.
    """

    def __init__(
        self,
        folder: Path,
        ref: VersionRef,
        base: VersionRef,
        specs: Sequence[TensorSpec],
        *,
        mirror: Mirror,
        encoding: DeltaEncoding,
    ) -> None:
        self._folder, self._ref, self._base, self._specs = folder, ref, base, specs
        self._mirror, self._encoding = mirror, encoding
        self._hashes = TensorHashes()
        self._blocks: dict[str, list[Block]] = {spec.name: [] for spec in specs}
        self._files: dict[str, int] = {}
        self._pool = ThreadPoolExecutor(num_workers())
        self._scratch = threading.local()
        self._codecs: list[BlockCodec] = []
        self._syncs: list[Future[None]] = []

    @property
    def changed_fraction(self) -> float:
        elements = sum(prod(spec.shape) for spec in self._specs)
        return sum(codec.changed_elements for codec in self._codecs) / max(1, elements)

    def write(self, bucket: BucketSpec, data: np.ndarray) -> None:
        name, end, descriptor = f"changed-{len(self._files) + 1:05d}.zst", 0, -1
        try:
            for block, frame in in_order(self._pool, self._encode, hashed_blocks(bucket, data, self._hashes)):
                if frame is None:
                    continue
                if descriptor < 0:
                    descriptor = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
                write_at(descriptor, memoryview(frame), end)
                stop = block.start + len(block.data)
                self._blocks[block.spec.name].append(
                    Block(file=name, offset=end, nbytes=len(frame), start=block.start, stop=stop)
                )
                end += len(frame)
        except BaseException:
            if descriptor >= 0:
                os.close(descriptor)
            raise
        if descriptor >= 0:
            self._files[name] = end
            # In the background, so that the disk works while the next bucket is gathered.
            self._syncs.append(self._pool.submit(sync_and_close, descriptor))

    def finish(self) -> Manifest:
        for sync in self._syncs:
            sync.result()
        manifest = Manifest(
            ref=self._ref,
            base=self._base,
            encoding=self._encoding,
            files=self._files,
            tensors={
                spec.name: StoredTensor(
                    spec=spec, xxh3=self._hashes.digest(spec.name), blocks=tuple(self._blocks[spec.name])
                )
                for spec in self._specs
            },
        )
        write_manifest(self._folder, manifest)
        return manifest

    def close(self) -> None:
        # What was written is being synchronised or will be: each closes its file.
        self._pool.shutdown()

    def _encode(self, block: TensorBlock) -> bytes | None:
        """The frame of what changed in the block, None if nothing did; the mirror has the new bytes then."""
        if not hasattr(self._scratch, "codec"):
            self._scratch.codec = BlockCodec(self._encoding)
            self._codecs.append(self._scratch.codec)
            self._scratch.buffer = np.empty(BLOCK_BYTES, dtype=np.uint8)
        old = self._scratch.buffer[: len(block.data)]
        self._mirror.read(block.spec.name, block.start, old)
        frame = self._scratch.codec.encode(old, block.data, element_bytes(block.spec.dtype))
        if frame is not None:
            self._mirror.write(block.spec.name, block.start, block.data)
        return frame
