"""Checkpoints to block FP8 and back, tensor by tensor, and what tells that it went well."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from slimrl_tools.exit_codes import CheckFailed
from slimrl_tools.output_folder import source_files
from slimrl_tools.progress import Advance
from slimrl_tools.rewrite import Rewrite
from torch import Tensor

from slimrl.data.protocols import TensorSpec
from slimrl.models.checkpoint import check_tensors
from slimrl.models.checkpoint_reader import CheckpointReader, read_whole
from slimrl.models.family import family_of
from slimrl.models.fp8 import FP8_DTYPE, FP8_MAX, MIN_ABSMAX, SCALE_SUFFIX, Block, BlockFp8, dequantize, quantize
from slimrl.models.fp8_tensors import kept_modules, quantized_names, quantized_specs
from slimrl.models.hf_checkpoint import DequantizingReader
from slimrl.models.hf_config import dtype_name, plain_config, read_hf_config
from slimrl.models.safetensors_file import spec_bytes
from slimrl.models.safetensors_folder import MAX_SHARD_BYTES, SafetensorsFolder

CHECKED_TILE_ROWS = 8
"""Tile rows of a matrix that the check compares at a time."""


def quantization(
    src: SafetensorsFolder, block: Block, not_convert: Sequence[str], shard_bytes: int = MAX_SHARD_BYTES
) -> Rewrite:
    """How a plain checkpoint becomes one in block FP8.

    Args:
        src: stays open until the checkpoint is written.
        not_convert: modules that keep their precision besides those that always do; see BlockFp8.

    Raises:
        ValueError: the source is quantised already, of no supported family, or not what its config says.
    """
    config = read_hf_config(src.path)
    if config.get("quantization_config"):
        raise ValueError(f"{src.path}: is quantised already, its config.json has a quantization_config")
    fp8 = BlockFp8(block=block, not_converted=tuple(not_convert))
    try:
        family = family_of(config)
        quantized = quantized_names(family.weight_map(config, mtp=True), fp8)
    except ValueError as error:
        raise ValueError(f"{src.path}: {error}") from error
    check_tensors(src, family, config)
    quantized &= src.specs.keys()
    specs = list(src.specs.values())
    written = BlockFp8(block=block, not_converted=kept_modules(specs, quantized))

    def compare(out: Path, advance: Advance) -> None:
        with SafetensorsFolder(out) as result:
            check_quantized(src, result, block, advance)

    return Rewrite(
        title="quantize",
        src=src.path,
        specs=quantized_specs(specs, quantized, fp8),
        produce=lambda group: _quantized(src, group, block),
        config={**config, "quantization_config": written.as_config()},
        job=_job(
            "quantize", src.path, format="fp8-block", block=block, not_convert=sorted(not_convert), shard=shard_bytes
        ),
        max_shard_bytes=shard_bytes,
        compare=compare,
    )


def dequantization(src: SafetensorsFolder, dtype: str, shard_bytes: int = MAX_SHARD_BYTES) -> Rewrite:
    """How a checkpoint in block FP8, of any family, becomes a plain one.

    Args:
        dtype: as torch prints it, of what was float8 and of tensors in the dtype that the config gives; float32 among
            bfloat16 stays.

    Raises:
        ValueError: the source is not in block FP8.
    """
    config = read_hf_config(src.path)
    fp8 = BlockFp8.of_config(config)
    if fp8 is None:
        raise ValueError(f"{src.path}: is not quantised, its config.json has no quantization_config")
    reader, before = DequantizingReader(src, fp8, dtype), dtype_name(config)
    specs = [
        TensorSpec(name=spec.name, shape=spec.shape, dtype=dtype if spec.dtype == before else spec.dtype)
        for spec in reader.specs.values()
    ]

    return Rewrite(
        title="dequantize",
        src=src.path,
        specs=specs,
        produce=lambda group: ((spec.name, read_whole(reader, spec.name)) for spec in group),
        config=plain_config(config, dtype),
        job=_job("dequantize", src.path, dtype=dtype, shard=shard_bytes),
        max_shard_bytes=shard_bytes,
    )


def check_quantized(src: CheckpointReader, result: SafetensorsFolder, block: Block, advance: Advance) -> None:
    """Compare a checkpoint in block FP8 with its source: names, shapes, and values within the rounding error.

    A scale is its tile's largest magnitude / 448 bit for bit. An element is off by at most 1/16 of itself where that
    makes it a normal number of e4m3, else by half of the smallest one, scale / 1024. All else is equal bit for bit.

    Raises:
        CheckFailed: naming the first tensor that differs.
    """
    names = {name for name in result.specs if not name.endswith(SCALE_SUFFIX)}
    _check_names(result.path, names, set(src.specs))
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


def _job(command: str, src: Path, **options: Any) -> dict[str, Any]:
    return {"command": command, "source": str(src.resolve()), "files": source_files(src), **options}


def _quantized(src: SafetensorsFolder, group: Sequence[TensorSpec], block: Block) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one file; a matrix whose scales begin the file, the last one of the file before, is done again."""
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


def _check_names(path: Path, found: set[str], expected: set[str]) -> None:
    if found != expected:
        raise CheckFailed(f"{path}: other tensors than in the source: {', '.join(sorted(found ^ expected)[:5])}")


def _check_same(path: Path, name: str, expected: Tensor, found: Tensor) -> None:
    if found.dtype != expected.dtype or found.shape != expected.shape:
        raise CheckFailed(f"{path}: {name}: {found.dtype} {found.shape}, not {expected.dtype} {expected.shape}")
    if not torch.equal(found.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8)):
        raise CheckFailed(f"{path}: {name}: differs from the source")


def _check_rounding(src: CheckpointReader, result: SafetensorsFolder, name: str, block: Block) -> None:
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


def _expected_scales(weight_MN: Tensor, block: Block) -> Tensor:
    """float32 [ceil(M / block rows), ceil(N / block columns)], tile by tile as the format defines them."""
    (height, width), (rows, columns) = block, weight_MN.shape
    padded_MN = torch.nn.functional.pad(weight_MN.abs(), (0, -columns % width, 0, -rows % height))
    absmax_RC = padded_MN.unflatten(1, (-1, width)).unflatten(0, (-1, height)).amax((1, 3))
    return absmax_RC.clamp(min=MIN_ABSMAX) / FP8_MAX
