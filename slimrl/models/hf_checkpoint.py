"""Opening a Hugging Face checkpoint folder, whether its weights are plain or in block FP8."""

from pathlib import Path

import torch
from torch import Tensor

from slimrl.data.protocols import TensorSpec
from slimrl.models.checkpoint_reader import CheckpointReader
from slimrl.models.fp8 import FP8_DTYPE, SCALE_SUFFIX, BlockFp8, dequantize
from slimrl.models.hf_config import dtype_name, read_hf_config
from slimrl.models.safetensors_folder import SafetensorsFolder


def is_block_fp8(path: Path) -> bool:
    """Whether a folder's config.json says that its weights are in block FP8.

    Raises:
        ValueError: the config.json is broken, or the weights are quantised in a way that is not supported.
    """
    return BlockFp8.of_config(read_hf_config(path)) is not None


def open_hf_checkpoint(path: Path, dtype: str | None = None) -> CheckpointReader:
    """A reader of the weights that a model computes with: a quantised checkpoint is dequantised as it is read.

    Args:
        dtype: of matrices that are dequantised, as torch prints it without the prefix; None for the checkpoint's.

    Raises:
        ValueError: the folder or its config.json is broken, or quantised in a way that is not supported.
    """
    config = read_hf_config(path)
    try:
        fp8 = BlockFp8.of_config(config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    folder = SafetensorsFolder(path)
    return folder if fp8 is None else DequantizingReader(folder, fp8, dtype or dtype_name(config))


class DequantizingReader:
    """Implements CheckpointReader over a folder in block FP8: matrices in `dtype`, scales out of sight.

    What is quantised is told by the tensors: each that is float8 has its scales beside it, `X_scale_inv`.

    Raises:
        ValueError: scales without a matrix or a matrix without scales, or of shapes that do not fit together.
    """

    def __init__(self, folder: SafetensorsFolder, fp8: BlockFp8, dtype: str) -> None:
        self._folder, self._fp8, self._dtype = folder, fp8, dtype
        self._quantized = {name for name, spec in folder.specs.items() if spec.dtype == FP8_DTYPE}
        scales = {name for name in folder.specs if name.endswith(SCALE_SUFFIX)}
        self._check(scales)
        self.specs: dict[str, TensorSpec] = {
            name: TensorSpec(name=name, shape=spec.shape, dtype=dtype) if name in self._quantized else spec
            for name, spec in folder.specs.items()
            if name not in scales
        }

    @property
    def path(self) -> Path:
        return self._folder.path

    @property
    def quantized(self) -> frozenset[str]:
        """Names of the tensors that are float8 on disk."""
        return frozenset(self._quantized)

    def read(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        """A slice of a tensor; of a quantised one, the float8 elements and the scales of the tiles that it touches.

        Raises:
            ValueError: the matrix holds NaN, or the file has become shorter.
        """
        if name not in self._quantized:
            return self._folder.read(name, slices)
        block = self._fp8.block
        starts = [part.start // size for part, size in zip(slices, block, strict=True)]
        stops = [-(-part.stop // size) for part, size in zip(slices, block, strict=True)]
        tiles = tuple(slice(start, stop) for start, stop in zip(starts, stops, strict=True))
        weight_MN = self._folder.read(name, slices)
        scale_RC = self._folder.read(name + SCALE_SUFFIX, tiles)
        offset = (slices[0].start % block[0], slices[1].start % block[1])
        try:
            return dequantize(weight_MN, scale_RC, getattr(torch, self._dtype), block, offset)
        except ValueError as error:
            raise ValueError(f"{self.path}: {name}: {error}") from error

    def close(self) -> None:
        self._folder.close()

    def __enter__(self) -> "DequantizingReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self, scales: set[str]) -> None:
        specs = self._folder.specs
        problems = [
            f"{name}: scales of no float8 tensor"
            for name in scales
            if name.removesuffix(SCALE_SUFFIX) not in self._quantized
        ]
        for name in self._quantized:
            spec = specs[name]
            if len(spec.shape) != 2:
                problems.append(f"{name}: float8 of shape {list(spec.shape)}, only matrices are supported")
            elif name + SCALE_SUFFIX not in scales:
                problems.append(f"{name}: float8, but {SCALE_SUFFIX} is missing")
            elif specs[name + SCALE_SUFFIX].shape != (due := self._fp8.scale_spec(spec).shape):
                found = list(specs[name + SCALE_SUFFIX].shape)
                problems.append(
                    f"{name}: scales of shape {found}, tiles of {list(self._fp8.block)} make it {list(due)}"
                )
        if problems:
            raise ValueError(f"{self.path}: {len(problems)} tensors are not block FP8, the first is {min(problems)}")
