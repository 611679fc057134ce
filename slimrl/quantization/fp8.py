"""Block FP8: matrices in float8_e4m3fn, one float32 scale for each tile, the format of DeepSeek-V3's checkpoints.

    scale = max(absmax of the tile, 1e-10) / 448        weight = float8(weight / scale)        weight' = weight * scale

The scale is stored as `X.weight_scale_inv`, which despite its name is the factor to multiply with. It stays in float32:
rounding it would change weights that were rounded with it. Tiles at the right and lower edges may be partial.
Both directions work on any device and go through a matrix in bands of whole tile rows.

Dimensions: M rows and N columns of a matrix, R rows and C columns of tiles, B matrices of one shape.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from slimrl.config.wrapper import wrapper_of
from slimrl.data.model_weights import TensorSpec
from slimrl.models.hf_config import FP8_BLOCK, MXFP4_REFUSED, is_mxfp4
from slimrl.models.hf_config import SCALE_SUFFIX as SCALE_SUFFIX

FP8_DTYPE = "float8_e4m3fn"
FP8_MAX = 448.0
"""Largest finite value of float8_e4m3fn."""

MIN_ABSMAX = 1e-10
"""Smallest absmax of a tile, also of zeros."""

NOT_FINITE = "the matrix holds NaN or infinity"

BAND_BYTES = 1 << 22
"""Bytes of a band in float32 on a CPU, where it stays in the cache; a single tile row may be larger."""

GPU_BAND_BYTES = 1 << 28
"""The same on a GPU, where few launches matter."""

TileShape = tuple[int, int]
"""Numbers of rows and columns of a tile."""


_FLOAT16_FACTOR = 256.0
"""An e4m3 code whose bits are put into a float16 is too small by this: 2 to the difference of the exponents' biases."""

_NAN_CODE = 0x7F << 7
"""e4m3's NaN, without its sign, where `_dequantize_band` has moved its bits."""


@dataclass(frozen=True, kw_only=True)
class BlockFp8:
    """The `quantization_config` of a config.json for block FP8."""

    block: TileShape = FP8_BLOCK
    not_converted: tuple[str, ...] = ()
    """Modules that keep their precision: full names, or parts of names that end where a dot or the name does. Of a
    wrapped model by the names of its text model's family."""

    @classmethod
    def of_config(cls, hf_config: dict[str, Any]) -> "BlockFp8 | None":
        """The `quantization_config` of a config; None for a config without quantisation.

        Raises:
            ValueError: another quantisation; names what is not supported.
        """
        raw = hf_config.get("quantization_config")
        if not raw:
            return None
        if is_mxfp4(hf_config):
            raise ValueError(f"config.json: {MXFP4_REFUSED}")
        block = raw.get("weight_block_size")
        problems = [
            f"{key} {raw.get(key, default)!r}, only {known!r} is supported"
            for key, default, known in (
                ("quant_method", None, "fp8"),
                ("fmt", "e4m3", "e4m3"),
                ("activation_scheme", "dynamic", "dynamic"),
            )
            if raw.get(key, default) != known
        ]
        if not problems and not _is_block(block):
            problems.append(f"weight_block_size {block!r}, only two sizes such as [128, 128] are supported")
        if problems:
            raise ValueError(f"config.json: quantization_config: {'; '.join(problems)}")
        names = raw.get("modules_to_not_convert") or raw.get("ignored_layers") or ()
        if wrapper := wrapper_of(hf_config):
            names = map(wrapper.text_name, names)
        return cls(block=(block[0], block[1]), not_converted=tuple(names))

    def as_config(self) -> dict[str, Any]:
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(self.block),
            "modules_to_not_convert": list(self.not_converted),
        }

    def converts(self, tensor_name: str) -> bool:
        """Whether `modules_to_not_convert` leaves a linear layer's weight to be quantised, read as SGLang reads it.

        A name matches whole modules of the path, with or without `model.` in front: `mlp.gate` is not part of
        `mlp.gate_proj`. An engine holds the routed experts of a layer as one module, so a name of one of them keeps all
        of them. The weight map says which tensors are linear layers (Rule.quantizable).
        """
        module = tensor_name.removesuffix(".weight")
        before, experts, _ = module.partition(".experts.")
        module = f"{before}.experts" if experts else module
        names = [name.removeprefix("model.").strip(".") for name in self.not_converted]
        if any(f".{name}." in f".{module}." for name in names):
            return False
        return not (experts and any(f".{module}." in f".model.{name}." for name in names))

    def quantized_spec(self, spec: TensorSpec) -> TensorSpec:
        """Spec of a matrix as it is stored, in float8."""
        return replace(spec, dtype=FP8_DTYPE)

    def scale_spec(self, spec: TensorSpec) -> TensorSpec:
        """Spec of the scales of a matrix."""
        rows, columns = spec.shape
        shape = (-(-rows // self.block[0]), -(-columns // self.block[1]))
        return replace(spec, name=spec.name + SCALE_SUFFIX, shape=shape, dtype="float32")


def _is_block(block: Any) -> bool:
    return (
        isinstance(block, list | tuple)
        and len(block) == 2
        and all(isinstance(size, int) and size > 0 for size in block)
    )


def quantize(
    weight_MN: Tensor, block: TileShape = FP8_BLOCK, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Round a matrix to block FP8.

    Args:
        weight_MN: float32, bfloat16 or float16, on any device.
        out: what to fill and return instead of new tensors, of the shapes and dtypes below.

    Returns:
        float8_e4m3fn [M, N] and the scales, float32 [ceil(M / block rows), ceil(N / block columns)]. An element of a
        tile's normal range, absmax / 28672 and above, is off by at most 1/16 of itself; a smaller one by at most
        absmax / 458752.

    Raises:
        ValueError: not a matrix, or it holds NaN or infinity.
    """
    if weight_MN.ndim != 2 or not weight_MN.is_floating_point() or weight_MN.element_size() == 1:
        raise ValueError(f"only matrices of floats are quantised, this is {weight_MN.dtype} {list(weight_MN.shape)}")
    (rows, columns), device = weight_MN.shape, weight_MN.device
    quantized_MN, scale_RC = out or (
        torch.empty((rows, columns), dtype=torch.float8_e4m3fn, device=device),
        torch.empty((-(-rows // block[0]), -(-columns // block[1])), dtype=torch.float32, device=device),
    )
    if not quantize_batch(weight_MN[None], block, (quantized_MN[None], scale_RC[None])):
        raise ValueError(NOT_FINITE)
    return quantized_MN, scale_RC


def quantize_batch(weight_BMN: Tensor, block: TileShape, out: tuple[Tensor, Tensor]) -> Tensor:
    """Round matrices of one shape to block FP8, each to the bits that `quantize` gives it, with few launches.

    Args:
        weight_BMN: float32, bfloat16 or float16; the matrices may lie apart.
        out: what to fill, float8_e4m3fn [B, M, N] and float32 [B, R, C]; the same.

    Returns:
        bool, a scalar on the device: all values are finite. A tile with NaN or infinity has a scale that is not.
    """
    quantized_BMN, scale_BRC = out
    (number, rows, columns), device = weight_BMN.shape, weight_BMN.device
    band_rows = _band_rows(rows, columns, block[0], device)
    at_once = max(1, _band_budget(device) // max(1, 4 * rows * columns))
    buffer = torch.empty(min(at_once, number) * band_rows * columns, dtype=torch.float32, device=device)
    # A GPU divides by a Python number by multiplying with its rounded reciprocal, which gives other bits.
    fp8_max = torch.full((), FP8_MAX, dtype=torch.float32, device=device)
    for start in range(0, number, at_once):
        some = slice(start, min(start + at_once, number))
        for tiles, band in _bands(rows, columns, block[0], device):
            height = min(block[0], rows - band.start)
            shape = (some.stop - start, band.stop - band.start, columns)
            band_bmN = buffer[: prod(shape)].view(shape).copy_(weight_BMN[some, band])
            band_tmN = band_bmN.view(-1, height, columns)
            absmax_tN = torch.maximum(band_tmN.amax(1), band_tmN.amin(1).neg_())
            scale_tC = _column_tiles(absmax_tN, block[1]).clamp_(min=MIN_ABSMAX).div_(fp8_max)
            scale_BRC[some, tiles] = scale_tC.view(shape[0], -1, scale_tC.shape[1])
            band_tmN.div_(scale_tC.repeat_interleave(block[1], dim=1)[:, None, :columns])
            quantized_BMN[some, band].copy_(band_bmN)
    return torch.isfinite(scale_BRC).all()


def tile_absmax(weight_MN: Tensor, block: TileShape = FP8_BLOCK, offset: TileShape = (0, 0)) -> Tensor:
    """The largest absolute value of each tile of a matrix, or of the part of it that a piece of the matrix has.

    Args:
        weight_MN: float32, bfloat16 or float16.
        offset: row and column of its first element within its first tile.

    Returns:
        float32 [R, C]; NaN where a tile has one.
    """
    rows, columns = weight_MN.shape
    shape = [-(-(start + size) // tile) for start, size, tile in zip(offset, (rows, columns), block, strict=True)]
    absmax_RC = torch.empty(shape, dtype=torch.float32, device=weight_MN.device)
    for tiles, band in _piece_bands(rows, columns, block[0], offset[0], weight_MN.device):
        band_tmN = weight_MN[band].unflatten(0, (tiles.stop - tiles.start, -1))
        absmax_tN = torch.maximum(band_tmN.amax(1), band_tmN.amin(1).neg_()).float()
        absmax_RC[tiles] = _column_tiles(torch.nn.functional.pad(absmax_tN, (offset[1], 0)), block[1])
    return absmax_RC


def scales_of(absmax_RC: Tensor) -> Tensor:
    """float32 [R, C]: the scale of each tile, from its largest absolute value."""
    fp8_max = torch.full((), FP8_MAX, dtype=torch.float32, device=absmax_RC.device)
    return absmax_RC.clamp(min=MIN_ABSMAX).div_(fp8_max)


def quantize_with(weight_MN: Tensor, scale_RC: Tensor, block: TileShape, offset: TileShape, out: Tensor) -> None:
    """Round a piece of a matrix to the bits that `quantize` gives it as a part of the whole.

    Args:
        weight_MN: float32, bfloat16 or float16.
        scale_RC: float32, the scales of the tiles of which the piece has some.
        offset: row and column of its first element within its first tile.
        out: float8_e4m3fn [M, N], filled.
    """
    rows, columns = weight_MN.shape
    for tiles, band in _piece_bands(rows, columns, block[0], offset[0], weight_MN.device):
        scale_tN = scale_RC[tiles].repeat_interleave(block[1], dim=1)[:, None, offset[1] : offset[1] + columns]
        # A copy also of a float32 weight.
        band_tmN = weight_MN[band].to(torch.float32, copy=True).unflatten(0, (tiles.stop - tiles.start, -1))
        out[band].copy_(band_tmN.div_(scale_tN).flatten(0, 1))


def dequantize(
    quantized_MN: Tensor, scale_RC: Tensor, dtype: torch.dtype, block: TileShape = FP8_BLOCK, offset: TileShape = (0, 0)
) -> Tensor:
    """Undo `quantize`, rounding once, from float32 to `dtype`.

    Args:
        quantized_MN: float8_e4m3fn; a whole matrix or a piece of one.
        scale_RC: the scales of its tiles, any float dtype.
        offset: row and column of its first element within its first tile.

    Raises:
        ValueError: the shapes do not fit together, or the matrix holds NaN.
    """
    (rows, columns), device = quantized_MN.shape, quantized_MN.device
    needed = tuple(-(-(start + size) // tile) for start, size, tile in zip(offset, (rows, columns), block, strict=True))
    if scale_RC.shape != needed:
        raise ValueError(f"scales of shape {list(scale_RC.shape)}, tiles of {list(block)} need {list(needed)}")
    result_MN = torch.empty((rows, columns), dtype=dtype, device=device)
    factor_RC = scale_RC.to(torch.float32) * _FLOAT16_FACTOR
    factor_RN = factor_RC.repeat_interleave(block[1], dim=1)[:, offset[1] : offset[1] + columns]
    scratch = _Scratch(_band_rows(rows, columns, block[0], device), columns, device)
    first = min(rows, block[0] - offset[0])
    largest = []
    if first:
        largest.append(_dequantize_band(quantized_MN[:first], result_MN[:first], factor_RN[:1], scratch))
    for tiles, band in _bands(rows - first, columns, block[0], device):
        factor_tN = factor_RN[tiles.start + 1 : tiles.stop + 1]
        band = slice(band.start + first, band.stop + first)
        largest.append(_dequantize_band(quantized_MN[band], result_MN[band], factor_tN, scratch))
    if largest and bool((torch.stack(largest) == _NAN_CODE).any()):
        raise ValueError("the matrix holds NaN")
    return result_MN


class _Scratch:
    """Memory for one band, reused for each: fresh pages would cost as much as the arithmetic."""

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        self.bits, self.magnitude = torch.empty((2, rows, columns), dtype=torch.int16, device=device)
        self.values = torch.empty((rows, columns), dtype=torch.float32, device=device)


def _dequantize_band(quantized_mN: Tensor, result_mN: Tensor, factor_tN: Tensor, scratch: _Scratch) -> Tensor:
    """Fill the result's rows, tile rows of one height with a row of factors each.

    Moves the bits of each code (a sign, four bits of exponent, three of mantissa) into a float16. That is exact, also
    for subnormal codes, and on a CPU several times as fast as torch's own conversion.

    Returns:
        The largest code without its sign, as an int16 of moved bits.
    """
    rows, columns = quantized_mN.shape
    bits_mN = scratch.bits[:rows].copy_(quantized_mN.view(torch.int8))
    bits_mN.bitwise_left_shift_(7).bitwise_and_(~(1 << 14))
    largest = torch.bitwise_and(bits_mN, 0x7FFF, out=scratch.magnitude[:rows]).amax()
    values_mN = scratch.values[:rows].copy_(bits_mN.view(torch.float16))
    values_mN.view(len(factor_tN), -1, columns).mul_(factor_tN[:, None])
    result_mN.copy_(values_mN)
    return largest


def _band_rows(rows: int, columns: int, tile_rows: int, device: torch.device) -> int:
    """Rows of the largest band."""
    return min(rows, max(1, _band_budget(device) // max(1, 4 * tile_rows * columns)) * tile_rows)


def _band_budget(device: torch.device) -> int:
    return GPU_BAND_BYTES if device.type == "cuda" else BAND_BYTES


def _bands(rows: int, columns: int, tile_rows: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """(tile rows, rows) of each band; a partial tile row at the end is a band of its own."""
    step = max(1, _band_rows(rows, columns, tile_rows, device) // tile_rows)
    whole = rows // tile_rows
    for start in range(0, whole, step):
        stop = min(start + step, whole)
        yield slice(start, stop), slice(start * tile_rows, stop * tile_rows)
    if rows % tile_rows:
        yield slice(whole, whole + 1), slice(whole * tile_rows, rows)


def _piece_bands(
    rows: int, columns: int, tile_rows: int, offset: int, device: torch.device
) -> Iterator[tuple[slice, slice]]:
    """(tile rows, rows) of each band of a piece that begins `offset` rows below the beginning of a tile. A partial tile
    row, the first or the last, is a band of its own."""
    first = min(rows, tile_rows - offset) if offset else 0
    if first:
        yield slice(0, 1), slice(0, first)
    skipped = int(first > 0)
    for tiles, band in _bands(rows - first, columns, tile_rows, device):
        yield (
            slice(tiles.start + skipped, tiles.stop + skipped),
            slice(band.start + first, band.stop + first),
        )


def _column_tiles(absmax_tN: Tensor, tile_columns: int) -> Tensor:
    """Largest value of each tile, of the largest of each column within the tile row."""
    missing = -absmax_tN.shape[1] % tile_columns
    if missing:
        absmax_tN = torch.nn.functional.pad(absmax_tN, (0, missing))
    return absmax_tN.unflatten(1, (-1, tile_columns)).amax(2)
