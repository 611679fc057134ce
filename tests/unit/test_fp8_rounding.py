"""Values rounded to FP8 and back, against rounding written out in float64."""

import itertools
import math

import pytest
import torch

from slimrl.quantization.fp8 import dequantize, quantize
from slimrl.quantization.rounding import E4M3, E5M2, round_scaled, round_tiles

LARGEST = {E4M3: 448.0, E5M2: 57344.0}
MANTISSA, LEAST_EXPONENT = {E4M3: 3, E5M2: 2}, {E4M3: -6, E5M2: -14}


def nearest(value: float, dtype: torch.dtype) -> float:
    """The nearest value of a dtype, ties to the even mantissa, of a value in its range."""
    if value == 0:
        return 0.0
    exponent = max(math.frexp(abs(value))[1] - 1, LEAST_EXPONENT[dtype])
    step = 2.0 ** (exponent - MANTISSA[dtype])
    return round(value / step) * step  # Python rounds halves to even.


def reference(values, tile, dtype, power_of_two):
    """As the docstring of the module says, tile by tile."""
    result = torch.zeros(values.shape, dtype=torch.float64)
    for row, column in itertools.product(
        *(range(0, size, step) for size, step in zip(values.shape, tile, strict=True))
    ):
        part = values[row : row + tile[0], column : column + tile[1]]
        absmax = part.abs().max().item()
        if absmax == 0:
            continue
        # The scale itself is a float32.
        scale = torch.tensor(absmax, dtype=torch.float32).div(LARGEST[dtype]).item()
        if power_of_two:
            scale = 2.0 ** math.ceil(math.log2(scale))
        rounded = [[nearest(torch.tensor(v).div(scale).item(), dtype) * scale for v in line] for line in part.tolist()]
        result[row : row + tile[0], column : column + tile[1]] = torch.tensor(rounded, dtype=torch.float64)
    return result


def matrix(rows=37, columns=70, seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator) * torch.logspace(-3, 2, columns)
    values[5:9] = 0
    return values


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("tile", [(1, 32), (32, 1), (16, 16), (37, 70)])
def test_each_tile_is_rounded_with_its_own_scale(tile, dtype, power_of_two):
    values = matrix()
    rounded = round_tiles(values, tile, dtype, power_of_two=power_of_two)
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded.double(), reference(values, tile, dtype, power_of_two), rtol=3e-7, atol=0.0)


def test_a_tile_may_be_larger_than_the_matrix_and_a_matrix_empty():
    values = matrix()
    assert torch.equal(round_tiles(values, (1 << 62, 1 << 62)), round_tiles(values, (37, 70)))
    assert round_tiles(values[:0], (1, 128)).shape == (0, 70)


def test_tiles_of_a_weight_have_the_values_of_a_checkpoint_in_block_fp8():
    values = matrix(200, 300)
    assert torch.equal(round_tiles(values, (128, 128)), dequantize(*quantize(values), torch.float32))


def test_a_power_of_two_that_fits_exactly_is_kept():
    values = torch.tensor([[448.0, 1.0, -3.0]])
    assert torch.equal(round_tiles(values, (1, 128), power_of_two=True), values)
    assert torch.equal(round_tiles(values * 2**-9, (1, 128), power_of_two=True), values * 2**-9)


def test_nan_and_infinity_stay_visible():
    for wrong in (math.nan, math.inf):
        values = torch.ones(2, 256)
        values[1, 200] = wrong
        for power_of_two in (False, True):
            rounded = round_tiles(values, (1, 128), power_of_two=power_of_two)
            assert torch.equal(rounded[0], values[0])
            assert torch.equal(rounded[1, :128], values[1, :128])
            assert torch.isnan(rounded[1, 200])


def test_a_given_scale_saturates_and_underflows():
    values = torch.tensor([1e4, -1e4, 3.3, 1e-4, 0.0])
    assert round_scaled(values, torch.tensor(1.0), E4M3).tolist() == [448.0, -448.0, 3.25, 0.0, 0.0]
    assert round_scaled(values, torch.tensor(32.0), E4M3).tolist()[:2] == [32 * 320.0, -32 * 320.0]
    assert math.isnan(round_scaled(torch.tensor([math.nan]), torch.tensor(1.0), E5M2).item())
