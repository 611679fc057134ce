"""Values rounded to FP8 and back, to study the numbers of FP8 kernels where there are none.

    scale = absmax of the tile / largest finite value of the dtype        value' = dtype(value / scale) * scale

With power-of-two scales the scale is rounded up, so that no value leaves the range. The values of a tile of zeros stay
zero, those of a tile with NaN or infinity become NaN. Any device.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from slimrl.quantization.fp8 import TileShape

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def round_tiles(values_MN: Tensor, tile: TileShape, dtype: torch.dtype = E4M3, *, power_of_two: bool = False) -> Tensor:
    """Round each tile with a scale of its own; a tile may be larger than the matrix, and partial at its edges.

    With tiles of 128 x 128 in e4m3 these are the values for which `quantize` stores codes and scales.

    Returns:
        float32 [M, N].
    """
    rows, columns = values_MN.shape
    if not values_MN.numel():
        return values_MN.float()
    height, width = min(tile[0], rows), min(tile[1], columns)
    padding = (0, -columns % width, 0, -rows % height)
    values_RhCw = F.pad(values_MN.float(), padding).unflatten(1, (-1, width)).unflatten(0, (-1, height))
    absmax_RC = values_RhCw.abs().amax((1, 3), keepdim=True)
    scale_RC = torch.where(absmax_RC == 0, 1.0, absmax_RC / torch.finfo(dtype).max)
    if power_of_two:
        scale_RC = _power_of_two_above(scale_RC)
    rounded_RhCw = (values_RhCw / scale_RC).to(dtype).float() * scale_RC
    return rounded_RhCw.flatten(2, 3).flatten(0, 1)[:rows, :columns]


def round_scaled(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Round with a given scale, a scalar; values beyond its range become the largest, as Transformer Engine's casts.

    Returns:
        float32, of the shape of `values`.
    """
    largest = torch.finfo(dtype).max
    return (values.float() / scale).clamp(-largest, largest).to(dtype).float() * scale


def _power_of_two_above(scale: Tensor) -> Tensor:
    """The least power of two that is not below; NaN and infinity stay."""
    mantissa, exponent = torch.frexp(scale)
    exact = mantissa == 0.5
    power = torch.ldexp(torch.ones_like(scale), torch.where(exact, exponent - 1, exponent))
    return torch.where(torch.isfinite(scale), power, math.nan)
