"""A version written as a whole: a Hugging Face checkpoint, and a manifest in its folder."""

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from slimrl.checkpoints.other_files import copy_other_files
from slimrl.checkpoints.safetensors_file import file_layout, spec_bytes, write_at
from slimrl.checkpoints.safetensors_folder import plan_safetensors_files, write_index
from slimrl.checkpoints.versions.directory import sync_and_close
from slimrl.checkpoints.versions.manifest import Manifest, VersionRef
from slimrl.data.weights import TensorPart, TensorSpec
from slimrl.models.hf_config import plain_config, read_hf_config
from slimrl.quantization.fp8 import FP8_DTYPE
from slimrl.resync.last_version import LastVersion
from slimrl.resync.version_writer import TensorBlock, VersionWriter, in_order


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
        last_version: LastVersion | None = None,
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
        (self._folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        copy_other_files(self._model_dir, self._folder)
        for file in self._folder.iterdir():
            if file.name not in self._files:
                sync_and_close(os.open(file, os.O_RDONLY))


def _common_dtype(specs: Sequence[TensorSpec]) -> str:
    """Dtype of most of the bytes: expert biases may be float32 where the weights are bfloat16."""
    nbytes: Counter[str] = Counter()
    for spec in specs:
        nbytes[spec.dtype] += spec_bytes(spec)
    return nbytes.most_common(1)[0][0]
