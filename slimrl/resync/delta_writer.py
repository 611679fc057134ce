"""A version written as its changes against the last one, of which the sender keeps a copy."""

import os
from collections.abc import Sequence
from math import prod
from pathlib import Path

import numpy as np

from slimrl.checkpoints.safetensors_file import element_bytes, write_at
from slimrl.checkpoints.versions.codec import BlockCodec
from slimrl.checkpoints.versions.manifest import Frame, Manifest, VersionRef
from slimrl.config.schema.resync import DeltaEncoding
from slimrl.data.weights import TensorPart, TensorSpec
from slimrl.resync.last_version import LastVersion
from slimrl.resync.version_writer import TensorBlock, VersionWriter, in_order


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
