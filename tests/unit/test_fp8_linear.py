"""Linear layers whose operands are rounded to FP8, and the scales of delayed scaling."""

from types import SimpleNamespace

import pytest
import torch

from slimrl.quantization.rounding import E4M3, E5M2, round_scaled, round_tiles
from slimrl.trainer.fp8_delayed import DelayedScales, delayed_roundings
from slimrl.trainer.fp8_linear import WHOLE, TileRounding, fp8_linear

BLOCKWISE = TileRounding(inner=128, weight_tile=(128, 128))
MXFP8 = TileRounding(inner=32, power_of_two=True)
TENSORWISE = TileRounding(inner=WHOLE, outer=WHOLE, gradient_dtype=E5M2)


def operands(tokens=150, columns=160, rows=140):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, 1, columns, generator=generator) * torch.logspace(-2, 1, columns)
    w, dy = torch.randn(rows, columns, generator=generator), torch.randn(tokens, 1, rows, generator=generator)
    return x.requires_grad_(), w.requires_grad_(), dy * torch.logspace(-4, 0, tokens)[:, None, None]


def expected(x, w, dy, recipe):
    """y, dx and dw in float64, of operands rounded as each recipe of Transformer Engine says."""
    x, w, dy = x.detach().squeeze(1), w.detach(), dy.squeeze(1)

    def inner(values, dim, dtype=E4M3):
        """Rounded in tiles along this dimension."""
        if recipe == "tensorwise":
            return round_tiles(values, tuple(values.shape), dtype).double()
        size, exact = (128, False) if recipe == "blockwise" else (32, True)
        return round_tiles(values, (1, size) if dim == 1 else (size, 1), dtype, power_of_two=exact).double()

    gradients = E5M2 if recipe == "tensorwise" else E4M3
    if recipe == "blockwise":
        w_of_y = w_of_dx = round_tiles(w, (128, 128)).double()
    else:
        w_of_y, w_of_dx = inner(w, 1), inner(w, 0)
    y = inner(x, 1) @ w_of_y.T
    return y, inner(dy, 1, gradients) @ w_of_dx, inner(dy, 0, gradients).T @ inner(x, 0)


@pytest.mark.parametrize(
    ("recipe", "rounding"), [("blockwise", BLOCKWISE), ("mxfp8", MXFP8), ("tensorwise", TENSORWISE)]
)
def test_all_three_products_are_those_of_rounded_operands(recipe, rounding):
    x, w, dy = operands()
    y = fp8_linear(x, w, None, rounding=rounding, allreduce_dgrad=False, sequence_parallel=False, tp_group=None)
    y.backward(dy)
    for actual, due in zip((y, x.grad, w.grad), expected(x, w, dy, recipe), strict=True):
        torch.testing.assert_close(actual.squeeze(1).double(), due, rtol=1e-5, atol=1e-6 * due.abs().max().item())


def test_the_bias_is_not_rounded_and_a_frozen_weight_gets_no_gradient():
    x, w, dy = operands()
    bias = torch.full((w.shape[0],), 1 / 3, requires_grad=True)
    arguments = {"rounding": BLOCKWISE, "allreduce_dgrad": False, "sequence_parallel": False, "tp_group": None}
    w.requires_grad_(False)
    y = fp8_linear(x, w, bias, **arguments)
    assert torch.equal(y, fp8_linear(x, w, None, **arguments) + bias)
    y.backward(dy)
    assert w.grad is None
    torch.testing.assert_close(bias.grad, dy.sum((0, 1)))


def test_bfloat16_layers_give_bfloat16_and_experts_without_tokens_zeros():
    x, w, dy = (tensor.detach().bfloat16().requires_grad_() for tensor in operands())
    arguments = {"rounding": TENSORWISE, "allreduce_dgrad": False, "sequence_parallel": False, "tp_group": None}
    y = fp8_linear(x, w, None, **arguments)
    y.backward(dy)
    assert {y.dtype, x.grad.dtype, w.grad.dtype} == {torch.bfloat16}
    w.grad = None
    fp8_linear(x[:0], w, None, **arguments).sum().backward()
    assert not w.grad.any()


def scales_config(**fields):
    defaults = {"fp8_amax_history_len": 1, "fp8_amax_compute_algo": "most_recent", "fp8_margin": 0}
    return SimpleNamespace(**{**defaults, "tp_only_amax_red": False, **fields})


@pytest.mark.parametrize(
    ("fields", "uses"),
    [
        ({}, [None, 10, 40, 2, 2]),
        ({"fp8_amax_history_len": 2, "fp8_amax_compute_algo": "max"}, [None, 10, 40, 40, 2]),
        ({"fp8_margin": 1}, [None, 20, 80, 4, 4]),
    ],
)
def test_a_delayed_scale_comes_from_earlier_largest_values(fields, uses):
    """`uses` is the value that is mapped to the largest of e4m3 in each pass; None is a scale of 1."""
    scales = DelayedScales(scales_config(**fields), E4M3, 2, torch.device("cpu"))
    for largest, used in zip([10.0, 40.0, 2.0, 0.0, 1.0], uses, strict=True):
        values = torch.linspace(-largest, largest / 2, 50)
        scale = torch.tensor(1.0 if used is None else used / 448)
        assert torch.equal(scales.round(1, values), round_scaled(values, scale, E4M3))
        scales.update()
    assert scales.scale_N[0] == 1.0


class Chunk(torch.nn.Module):
    """One linear layer as a model chunk."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight
        (self.rounding,) = delayed_roundings(self, scales_config(), 1, weight.device)

    def forward(self, x):
        rounding = self.rounding
        return fp8_linear(
            x, self.weight, None, rounding=rounding, allreduce_dgrad=False, sequence_parallel=False, tp_group=None
        )


def test_the_scales_of_a_chunk_follow_its_passes():
    x, w, dy = operands()
    chunk, scales = Chunk(w), {"x": 1.0, "w": 1.0, "dy": 1.0}
    for factor in (1.0, 3.0, 0.5):
        given = {"x": (x.detach() * factor).requires_grad_(), "w": w, "dy": dy * factor}
        with torch.no_grad():
            chunk(given["x"] / 2)  # Leaves the scales as they are.
        w.grad = None
        y = chunk(given["x"])
        y.backward(given["dy"])
        qx, qw, qdy = (
            round_scaled(given[name].detach().view(-1, given[name].shape[-1]), torch.tensor(scale), dtype).double()
            for (name, scale), dtype in zip(scales.items(), (E4M3, E4M3, E5M2), strict=True)
        )
        for actual, due in ((y, qx @ qw.T), (given["x"].grad, qdy @ qw), (w.grad, qdy.T @ qx)):
            torch.testing.assert_close(
                actual.view(due.shape).double(), due, rtol=1e-5, atol=1e-6 * due.abs().max().item()
            )
        tops = {"x": 448.0, "w": 448.0, "dy": 57344.0}
        scales = {name: (given[name].abs().max() / top).item() for name, top in tops.items()}
