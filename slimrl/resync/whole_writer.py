"""A version written as a whole: a Hugging Face checkpoint with a manifest beside it."""

import json
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from slimrl.data.protocols import BucketSpec, TensorSpec
from slimrl.models.fp8 import FP8_DTYPE
from slimrl.models.hf_config import plain_config, read_hf_config
from slimrl.models.other_files import copy_other_files
from slimrl.models.safetensors_file import file_layout, spec_bytes, write_at
from slimrl.models.safetensors_folder import plan_files, write_index
from slimrl.models.versions.blocks import num_workers
from slimrl.models.versions.manifest import Manifest, StoredTensor, VersionRef, write_manifest
from slimrl.resync.mirror import Mirror
from slimrl.resync.version_writer import TensorBlock, TensorHashes, hashed_blocks, in_order, sync_and_close


class WholeWriter:
    """Implements VersionWriter.

    Args:
        folder: new and empty.
        specs: all tensors that will come, in order.
        model_dir: checkpoint whose configuration, tokenizer and code go with the weights.
        file_bytes: most bytes of one file; a larger tensor gets a file of its own.
        mirror: gets the tensors too; None where no delta will follow.
    """

    changed_fraction: float | None = None

    def __init__(
        self,
        folder: Path,
        ref: VersionRef,
        specs: Sequence[TensorSpec],
        model_dir: Path,
        *,
        file_bytes: int,
        mirror: Mirror | None = None,
    ) -> None:
        self._folder, self._ref, self._specs, self._model_dir, self._mirror = folder, ref, specs, model_dir, mirror
        self._files = plan_files(specs, file_bytes)
        self._file_of = {spec.name: name for name, group in self._files.items() for spec in group}
        self._missing = {name: sum(map(spec_bytes, group)) for name, group in self._files.items()}
        self._open: dict[str, tuple[int, dict[str, int]]] = {}
        self._hashes = TensorHashes()
        self._pool = ThreadPoolExecutor(num_workers())
        self._syncs: list[Future[None]] = []

    def write(self, bucket: BucketSpec, data: np.ndarray) -> None:
        for part in bucket.parts:
            self._create(self._file_of[part.spec.name])
        for _ in in_order(self._pool, self._write_block, hashed_blocks(bucket, data, self._hashes)):
            pass
        for part in bucket.parts:
            name = self._file_of[part.spec.name]
            self._missing[name] -= part.nbytes
        for name in {self._file_of[part.spec.name] for part in bucket.parts}:
            if not self._missing[name]:
                # Now and not at the end, so that the disk works while the next bucket is gathered.
                self._syncs.append(self._pool.submit(sync_and_close, self._open.pop(name)[0]))

    def finish(self) -> Manifest:
        for name, missing in self._missing.items():
            assert not missing, f"{name}: {missing} bytes never came"
        self._write_other_files()
        for sync in self._syncs:
            sync.result()
        files = sorted(self._folder.iterdir())
        manifest = Manifest(
            ref=self._ref,
            base=None,
            encoding=None,
            files={file.name: file.stat().st_size for file in files},
            tensors={spec.name: StoredTensor(spec=spec, xxh3=self._hashes.digest(spec.name)) for spec in self._specs},
        )
        write_manifest(self._folder, manifest)
        return manifest

    def close(self) -> None:
        # What was written is being synchronised or will be: each closes its file.
        self._pool.shutdown()
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
        if self._mirror is not None:
            self._mirror.write(block.spec.name, block.start, block.data)

    def _write_other_files(self) -> None:
        write_index(self._folder, self._files)
        config = read_hf_config(self._model_dir)
        if not any(spec.dtype == FP8_DTYPE for spec in self._specs):
            config = plain_config(config, _common_dtype(self._specs))
        (self._folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        copy_other_files(self._model_dir, self._folder)
        for file in self._folder.iterdir():
            if file.name not in self._files:
                sync_and_close(os.open(file, os.O_RDONLY))


def _common_dtype(specs: Sequence[TensorSpec]) -> str:
    """That of most of the bytes: of the weights, where biases that choose experts stay in float32 beside bfloat16."""
    nbytes: Counter[str] = Counter()
    for spec in specs:
        nbytes[spec.dtype] += spec_bytes(spec)
    return nbytes.most_common(1)[0][0]
