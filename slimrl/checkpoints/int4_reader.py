"""Reads a checkpoint whose matrices are packed INT4 as one with plain weights."""

import torch
from torch import Tensor

from slimrl.checkpoints.checkpoint_reader import CheckpointReader
from slimrl.data.model_weights import TensorSpec
from slimrl.models.hf_config import INT4_PER_WORD, PACKED_SCALE_SUFFIX, PACKED_SHAPE_SUFFIX, PACKED_SUFFIX
from slimrl.quantization.int4 import PackedInt4, dequantize


class Int4Reader(CheckpointReader):
    """The tensors tell what is quantised: each matrix X with an `X_packed`.

    Args:
        folder: the tensors as they are stored.
        dtype: of dequantised matrices, as torch prints it.

    Raises:
        ValueError: one of the three tensors of a matrix is missing, or their shapes do not fit together.
    """

    def __init__(self, folder: CheckpointReader, int4: PackedInt4, dtype: str) -> None:
        self.path, self.folder, self._group, self._dtype = folder.path, folder, int4.group, dtype
        self.left_out = folder.left_out
        names = [name.removesuffix(PACKED_SUFFIX) for name in folder.specs if name.endswith(f".weight{PACKED_SUFFIX}")]
        parts = {
            name + suffix for name in names for suffix in (PACKED_SUFFIX, PACKED_SCALE_SUFFIX, PACKED_SHAPE_SUFFIX)
        }
        packed = {name: TensorSpec(name=name, shape=self._shape(name), dtype=dtype) for name in names}
        self.packed = frozenset(packed)
        """Names of the matrices that are INT4 on disk."""
        self.specs = packed | {name: spec for name, spec in folder.specs.items() if name not in parts}

    def read(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        """A slice of a tensor; reads of a quantised one the groups of columns that it touches."""
        if name not in self.packed:
            return self.folder.read(name, slices)
        rows, columns = slices
        first, last = columns.start // self._group, -(-columns.stop // self._group)
        per_group = self._group // INT4_PER_WORD
        words = self.folder.read(name + PACKED_SUFFIX, (rows, slice(first * per_group, last * per_group)))
        scales = self.folder.read(name + PACKED_SCALE_SUFFIX, (rows, slice(first, last)))
        whole = dequantize(words, scales, getattr(torch, self._dtype), self._group)
        offset = first * self._group
        return whole[:, columns.start - offset : columns.stop - offset]

    def close(self) -> None:
        self.folder.close()

    def _shape(self, name: str) -> tuple[int, ...]:
        specs = self.folder.specs
        if missing := [
            name + suffix for suffix in (PACKED_SCALE_SUFFIX, PACKED_SHAPE_SUFFIX) if name + suffix not in specs
        ]:
            raise ValueError(f"{self.path}: {name + PACKED_SUFFIX} is there, but {' and '.join(missing)} missing")
        words, scales = specs[name + PACKED_SUFFIX].shape, specs[name + PACKED_SCALE_SUFFIX].shape
        fits = len(words) == len(scales) == 2 and words[0] == scales[0]
        if not fits or words[1] * INT4_PER_WORD != scales[1] * self._group:
            raise ValueError(
                f"{self.path}: {name}: {list(words)} words of {INT4_PER_WORD} columns do not fit {list(scales)} "
                f"scales, one for {self._group} columns"
            )
        return words[0], words[1] * INT4_PER_WORD
