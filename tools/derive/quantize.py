"""Checkpoints to block FP8 and back, tensor by tensor, and the check of the result."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from slimrl_tools.derive.rewrite import Rewrite
from slimrl_tools.exit_codes import CheckFailed
from slimrl_tools.progress import Advance
from torch import Tensor

from slimrl.checkpoints.checkpoint_reader import CheckpointReader, read_whole
from slimrl.checkpoints.hf_check import check_tensors
from slimrl.checkpoints.hf_checkpoint import StoredFolder, dequantizing, open_stored
from slimrl.checkpoints.safetensors_file import spec_bytes
from slimrl.checkpoints.safetensors_folder import SafetensorsFolder
from slimrl.checkpoints.stacked_experts import StackedFolder, read_each, restacked
from slimrl.checkpoints.wrapped_folder import WrappedFolder, with_experts_apart
from slimrl.config.wrapper import wrapper_of
from slimrl.data.model_weights import TensorSpec
from slimrl.models.family import family_of
from slimrl.models.hf_config import dtype_name, is_mxfp4, plain_config, read_hf_config
from slimrl.quantization.fp8 import (
    FP8_DTYPE,
    FP8_MAX,
    MIN_ABSMAX,
    SCALE_SUFFIX,
    BlockFp8,
    TileShape,
    dequantize,
    quantize,
)
from slimrl.quantization.fp8_tensors import check_modules, kept_modules, quantized_names, quantized_specs

CHECKED_TILE_ROWS = 8
"""Tile rows that the check compares at a time."""


def quantization(src: StoredFolder, block: TileShape, not_convert: Sequence[str]) -> Rewrite:
    """A plain checkpoint in block FP8; of a wrapped model with its experts apart, as released ones in FP8 may be.

    Args:
        src: open until the checkpoint is written.
        not_convert: further modules that keep their precision; see BlockFp8.

    Raises:
        ValueError: the source is quantised already, its family is not supported, or it does not match its config.
    """
    config = read_hf_config(src.path)
    if config.get("quantization_config"):
        raise ValueError(f"{src.path}: is quantised already, its config.json has a quantization_config")
    if (wrapper := wrapper_of(config)) and not wrapper.block_fp8:
        raise ValueError(f"{src.path}: a {wrapper.model_type} in block FP8 is not supported")
    fp8 = BlockFp8(block=block, not_converted=tuple(not_convert))
    try:
        family = family_of(config)
        weight_map = family.weight_map(config, mtp=True)
        check_modules(weight_map, not_convert)
        quantized = quantized_names(weight_map, fp8)
    except ValueError as error:
        raise ValueError(f"{src.path}: {error}") from error
    check_tensors(src, family, config)
    quantized &= src.specs.keys()
    specs = list(src.specs.values())
    form = with_experts_apart(src)
    stored = [replace(spec, name=wrapper.stored_name(spec.name)) for spec in specs] if wrapper else specs
    by_stored = {spec.name for spec, text in zip(stored, specs, strict=True) if text.name in quantized}
    carried = src.layout.carried.values() if isinstance(src, WrappedFolder) else ()
    written = BlockFp8(block=block, not_converted=kept_modules([*stored, *carried], by_stored))

    def compare(out: Path, advance: Advance) -> None:
        with open_stored(out) as result:
            check_quantized(src, result, block, advance)

    return Rewrite(
        command="quantize",
        sources=[src.path],
        specs=quantized_specs(specs, quantized, fp8),
        produce=lambda group: _quantized(src, group, block),
        config={**config, "quantization_config": written.as_config()},
        form=form,
        options={"format": "fp8-block", "block": block, "not_convert": sorted(not_convert)},
        compare=compare,
    )


def dequantization(src: StoredFolder, dtype: str) -> Rewrite:
    """A checkpoint in block FP8 or packed INT4, of any family, or in MXFP4 as a plain one.

    Args:
        dtype: as torch prints it, for quantised tensors and those in the config's dtype; others keep theirs.

    Raises:
        ValueError: the source is not quantised, or in another format.
    """
    config = read_hf_config(src.path)
    if is_mxfp4(config):
        assert isinstance(src, SafetensorsFolder), "no wrapped model is in MXFP4"
        return _dequantization_of_mxfp4(src, config, dtype)
    reader, before = dequantizing(src, config, dtype), dtype_name(config)
    if reader is None:
        raise ValueError(f"{src.path}: is not quantised, its config.json has no quantization_config")
    return Rewrite(
        command="dequantize",
        sources=[src.path],
        specs=[replace(spec, dtype=dtype if spec.dtype == before else spec.dtype) for spec in reader.specs.values()],
        produce=lambda group: ((spec.name, read_whole(reader, spec.name)) for spec in group),
        config=plain_config(config, dtype),
        form=src,
        options={"dtype": dtype},
    )


def _dequantization_of_mxfp4(src: SafetensorsFolder, hf_config: dict[str, Any], dtype: str) -> Rewrite:
    weight_map, before = family_of(hf_config).weight_map(hf_config), dtype_name(hf_config)
    reader = StackedFolder(src, weight_map, dtype)
    check_tensors(reader, family_of(hf_config), hf_config)
    specs = [replace(spec, dtype=dtype if spec.dtype == before else spec.dtype) for spec in reader.specs.values()]
    stored, produce = restacked(weight_map, specs, partial(read_each, reader))
    return Rewrite(
        command="dequantize",
        sources=[src.path],
        specs=stored,
        produce=produce,
        config=plain_config(hf_config, dtype),
        options={"dtype": dtype},
    )


def check_quantized(src: CheckpointReader, result: StoredFolder, block: TileShape, advance: Advance) -> None:
    """Compare a checkpoint in block FP8 with its source: names, shapes, and values within the rounding error.

    A scale is its tile's largest magnitude / 448, bit for bit. An element is off by at most 1/16 of itself where it is
    a normal number of e4m3, else by half of the smallest subnormal, scale / 1024. All else is equal bit for bit.

    Raises:
        CheckFailed: naming the first tensor that differs.
    """
    names = {name for name in result.specs if not name.endswith(SCALE_SUFFIX)}
    if names != src.specs.keys():
        differing = ", ".join(sorted(names ^ src.specs.keys())[:5])
        raise CheckFailed(f"{result.path}: other tensors than in the source: {differing}")
    for name, spec in result.specs.items():
        if name.endswith(SCALE_SUFFIX):
            advance(spec_bytes(spec))
            continue
        if spec.shape != src.specs[name].shape:
            raise CheckFailed(f"{result.path}: {name}: shape {spec.shape}, the source's is {src.specs[name].shape}")
        if spec.dtype != FP8_DTYPE:
            _check_same(result.path, name, read_whole(src, name), read_whole(result, name))
        else:
            _check_rounding(src, result, name, block)
        advance(spec_bytes(spec))


def _quantized(src: StoredFolder, group: Sequence[TensorSpec], block: TileShape) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one file. If it begins with the scales of the last matrix of another, that is quantised again."""
    scales: dict[str, Tensor] = {}
    for spec in group:
        if spec.name in src.specs and spec.dtype != FP8_DTYPE:
            yield spec.name, read_whole(src, spec.name)
            continue
        name = spec.name.removesuffix(SCALE_SUFFIX)
        if name not in scales:
            try:
                weight_MN, scales[name] = quantize(read_whole(src, name), block)
            except ValueError as error:
                raise ValueError(f"{src.path}: {name}: {error}") from error
        yield spec.name, scales.pop(name) if spec.name != name else weight_MN


def _check_same(path: Path, name: str, expected: Tensor, found: Tensor) -> None:
    if found.dtype != expected.dtype or found.shape != expected.shape:
        raise CheckFailed(f"{path}: {name}: {found.dtype} {found.shape}, not {expected.dtype} {expected.shape}")
    if not torch.equal(found.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8)):
        raise CheckFailed(f"{path}: {name}: differs from the source")


def _check_rounding(src: CheckpointReader, result: StoredFolder, name: str, block: TileShape) -> None:
    rows, columns = src.specs[name].shape
    height = CHECKED_TILE_ROWS * block[0]
    for start in range(0, rows, height):
        part = (slice(start, min(start + height, rows)), slice(0, columns))
        tiles = (slice(start // block[0], -(-part[0].stop // block[0])), slice(0, -(-columns // block[1])))
        scale_RC = result.read(name + SCALE_SUFFIX, tiles)
        weight_MN = src.read(name, part).to(torch.float32)
        back_MN = dequantize(result.read(name, part), scale_RC, torch.float32, block)
        scale_MN = scale_RC.repeat_interleave(block[0], 0)[: len(weight_MN)].repeat_interleave(block[1], 1)[:, :columns]
        if not torch.equal(scale_RC, _expected_scales(weight_MN, block)):
            raise CheckFailed(
                f"{result.path}: {name}{SCALE_SUFFIX}: differs from the source's largest magnitudes / 448"
            )
        limit_MN = torch.maximum(weight_MN.abs() * (2.0**-4 + 2.0**-20), scale_MN * (2.0**-10 + 2.0**-20))
        if not bool(((back_MN - weight_MN).abs() <= limit_MN).all()):
            raise CheckFailed(f"{result.path}: {name}: differs from the source by more than the rounding to float8")


def _expected_scales(weight_MN: Tensor, block: TileShape) -> Tensor:
    """float32 [ceil(M / block rows), ceil(N / block columns)], as the format defines them."""
    (height, width), (rows, columns) = block, weight_MN.shape
    padded_MN = torch.nn.functional.pad(weight_MN.abs(), (0, -columns % width, 0, -rows % height))
    absmax_RC = padded_MN.unflatten(1, (-1, width)).unflatten(0, (-1, height)).amax((1, 3))
    return absmax_RC.clamp(min=MIN_ABSMAX) / FP8_MAX
