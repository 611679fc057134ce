"""Opens a Hugging Face checkpoint folder, with plain weights, in block FP8, in packed INT4 or in MXFP4."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimrl.checkpoints.checkpoint_reader import CheckpointReader, block_rows
from slimrl.checkpoints.int4_reader import Int4Reader
from slimrl.checkpoints.safetensors_folder import SafetensorsFolder
from slimrl.checkpoints.stacked_experts import StackedFolder
from slimrl.checkpoints.wrapped_folder import WrappedFolder
from slimrl.config.hf_config import stacks_experts
from slimrl.config.wrapper import WRAPPED_IN, Wrapper, wrapper_of
from slimrl.data.model_weights import TensorSpec
from slimrl.models.family import family_of
from slimrl.models.hf_config import dtype_name, is_mxfp4, read_hf_config
from slimrl.models.tensor_names import EMBEDDING, HEAD, left_out
from slimrl.models.weight_map import WeightMap
from slimrl.quantization.fp8 import FP8_DTYPE, SCALE_SUFFIX, BlockFp8, dequantize
from slimrl.quantization.int4 import PackedInt4

PLAIN_DTYPES = frozenset({"float64", "float32", "bfloat16", "float16"})
"""Dtypes of weights that are not quantised."""


StoredFolder = SafetensorsFolder | WrappedFolder


def is_block_fp8(path: Path) -> bool:
    """Whether a folder's config.json says that its weights are in block FP8.

    Raises:
        ValueError: the config.json is broken, or the kind of quantisation is not supported.
    """
    config = read_hf_config(path)
    if is_mxfp4(config):
        return False
    return PackedInt4.of_config(config) is None and BlockFp8.of_config(config) is not None


def is_packed_int4(path: Path) -> bool:
    """Whether a folder's config.json says that its weights are in packed INT4. Raises as `is_block_fp8`."""
    return PackedInt4.of_config(read_hf_config(path)) is not None


def open_hf_checkpoint(path: Path, dtype: str | None = None) -> CheckpointReader:
    """A reader that dequantises a quantised checkpoint.

    Args:
        dtype: of dequantised matrices, as torch prints it without the prefix; None for the checkpoint's.

    Raises:
        ValueError: see `open_stored`, or the kind of quantisation is not supported.
    """
    config = read_hf_config(path)
    folder = open_stored(path)
    return dequantizing(folder, config, dtype) or folder


def dequantizing(
    folder: StoredFolder, hf_config: dict[str, Any], dtype: str | None
) -> "DequantizingReader | Int4Reader | StackedFolder | None":
    """A reader of a quantised checkpoint's plain weights; None if it is not quantised.

    Raises:
        ValueError: the kind of quantisation is not supported, or the tensors are not of it.
    """
    given = dtype or dtype_name(hf_config)
    try:
        if weight_map := _stacking_map(hf_config):
            assert isinstance(folder, SafetensorsFolder), "no wrapped model has such experts"
            return StackedFolder(folder, weight_map, given)
        if int4 := PackedInt4.of_config(hf_config):
            return Int4Reader(folder, int4, given)
        fp8 = BlockFp8.of_config(hf_config)
    except ValueError as error:
        raise ValueError(f"{folder.path}: {error}") from error
    return None if fp8 is None else DequantizingReader(folder, fp8, given)


def _stacking_map(hf_config: dict[str, Any]) -> WeightMap | None:
    """The weight map of a model whose files hold the experts of a layer as one; None for others, also unknown ones."""
    if not stacks_experts(hf_config):
        return None
    return family_of(hf_config).weight_map(hf_config)


def open_stored(path: Path) -> StoredFolder:
    """The weights as they are stored, without the tensors that `left_out` names; of a wrapped model the text model's.

    Reads the headers, and of a tied model that stores its head the head and the embedding.

    Raises:
        ValueError: the folder or its config.json is broken; the head of a tied model is not its embedding;
            config.json has a quantization_config and the weights are plain; or a wrapped model is in block FP8 in a way
            that engines would not read.
    """
    config = read_hf_config(path)
    folder = _open_folder(path, config)
    _refuse_plain_weights(folder, config)
    reasons = left_out(folder.specs, config)
    if HEAD in reasons and not _equal(folder, HEAD, EMBEDDING):
        raise ValueError(
            f"{path}: {HEAD} differs from {EMBEDDING}, though config.json says tie_word_embeddings: true. If the model "
            f"has a head of its own, set that to false; if not, save the model without {HEAD}"
        )
    folder.leave_out(reasons)
    return folder


def form_of(reader: CheckpointReader) -> CheckpointReader:
    """The folder as it is stored that `open_hf_checkpoint` reads."""
    return reader.folder if isinstance(reader, DequantizingReader | Int4Reader) else reader


def left_out_note(reader: CheckpointReader) -> str | None:
    """Note on what a checkpoint stores that is no weight of the model; None if that is nothing."""
    names = list(reader.left_out)
    if not names:
        return None
    reasons = ", ".join(dict.fromkeys(reader.left_out.values()))
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{reader.path}: {names[0]}{others} left out, which no model reads ({reasons})"


def _refuse_plain_weights(folder: StoredFolder, hf_config: dict[str, Any]) -> None:
    """Raises ValueError for a cast of a quantised model that kept the quantised one's config.json."""
    given = hf_config.get("quantization_config")
    dtypes = {spec.dtype for spec in folder.specs.values()}
    if given and dtypes <= PLAIN_DTYPES:
        method = given.get("quant_method") if isinstance(given, dict) else None
        raise ValueError(
            f"{folder.path}: config.json has a quantization_config ({method}), but all weights are plain "
            f"({', '.join(sorted(dtypes))}): engines and each resync would round them. Remove quantization_config from "
            "config.json; `slimrl-tools quantize` writes block FP8"
        )


def _open_folder(path: Path, hf_config: dict[str, Any]) -> StoredFolder:
    wrapper = wrapper_of(hf_config)
    if wrapper is None:
        return SafetensorsFolder(path)
    folder = WrappedFolder(SafetensorsFolder(path), hf_config)
    if (hf_config.get("quantization_config") or {}).get("quant_method") == "fp8":
        _refuse_unserved_fp8(folder, wrapper, hf_config)
    return folder


def _refuse_unserved_fp8(folder: WrappedFolder, wrapper: Wrapper, hf_config: dict[str, Any]) -> None:
    """Raises ValueError for block FP8 that SGLang would not find, and for tensors that an export could not carry."""
    if not wrapper.block_fp8:
        raise ValueError(
            f"{folder.path}: a {wrapper.model_type} in block FP8 is not supported: SGLang looks for the modules of "
            "quantization_config under other names. Take the plain checkpoint"
        )
    if not hf_config[WRAPPED_IN].get("quantization_config"):
        raise ValueError(
            f"{folder.path}: config.json has its quantization_config in text_config, where SGLang does not find it. "
            "Move it out of text_config"
        )
    if quantized := [name for name, spec in folder.layout.carried.items() if spec.dtype == FP8_DTYPE]:
        raise ValueError(
            f"{folder.path}: {quantized[0]} is float8; exports are plain and repeat the tensors of other modalities as "
            "they are, so these must be plain"
        )


def _equal(folder: StoredFolder, name: str, other: str) -> bool:
    """Whether two tensors have the same shape and the same bits in float32, those of NaN included."""
    shape = folder.specs[name].shape
    if folder.specs[other].shape != shape:
        return False
    slices = tuple(slice(0, size) for size in shape)
    parts = ((rows, *slices[1:]) for rows in block_rows(folder, name, slices))
    bits = ([folder.read(each, part).float().view(torch.int32) for each in (name, other)] for part in parts)
    equal = all(torch.equal(*pair) for pair in bits)
    folder.close()
    return equal


class DequantizingReader(CheckpointReader):
    """Reads a folder in block FP8: matrices in `dtype`, without the scales.

    The tensors tell what is quantised: each float8 tensor X has its scales in `X_scale_inv`.

    Raises:
        ValueError: scales without a matrix or a matrix without scales, or of shapes that do not fit together.
    """

    def __init__(self, folder: StoredFolder, fp8: BlockFp8, dtype: str) -> None:
        self.path, self.folder, self._fp8, self._dtype = folder.path, folder, fp8, dtype
        self.left_out = folder.left_out
        self.quantized = frozenset(name for name, spec in folder.specs.items() if spec.dtype == FP8_DTYPE)
        """Names of the tensors that are float8 on disk."""
        scales = {name for name in folder.specs if name.endswith(SCALE_SUFFIX)}
        self._check(scales)
        self.specs: dict[str, TensorSpec] = {
            name: TensorSpec(name=name, shape=spec.shape, dtype=dtype) if name in self.quantized else spec
            for name, spec in folder.specs.items()
            if name not in scales
        }

    def read(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        """A slice of a tensor; reads of a quantised one the slice and the scales of the tiles that it touches.

        Raises:
            ValueError: the matrix holds NaN, or the file has become shorter.
        """
        if name not in self.quantized:
            return self.folder.read(name, slices)
        block = self._fp8.block
        tiles = tuple(
            slice(part.start // size, -(-part.stop // size)) for part, size in zip(slices, block, strict=True)
        )
        weight_MN = self.folder.read(name, slices)
        scale_RC = self.folder.read(name + SCALE_SUFFIX, tiles)
        offset = (slices[0].start % block[0], slices[1].start % block[1])
        try:
            return dequantize(weight_MN, scale_RC, getattr(torch, self._dtype), block, offset)
        except ValueError as error:
            raise ValueError(f"{self.path}: {name}: {error}") from error

    def close(self) -> None:
        self.folder.close()

    def _check(self, scales: set[str]) -> None:
        specs = self.folder.specs
        problems = [
            f"{name}: no float8 tensor has these scales"
            for name in scales
            if name.removesuffix(SCALE_SUFFIX) not in self.quantized
        ]
        for name in self.quantized:
            spec = specs[name]
            if len(spec.shape) != 2:
                problems.append(f"{name}: float8 of shape {list(spec.shape)}; only matrices are supported")
            elif name + SCALE_SUFFIX not in scales:
                problems.append(f"{name}: float8, but {SCALE_SUFFIX} is missing")
            elif specs[name + SCALE_SUFFIX].shape != (due := self._fp8.scale_spec(spec).shape):
                found = list(specs[name + SCALE_SUFFIX].shape)
                problems.append(f"{name}: scales {found}, tiles of {list(self._fp8.block)} need {list(due)}")
        if problems:
            raise ValueError(f"{self.path}: {len(problems)} tensors are not in block FP8, such as {min(problems)}")
