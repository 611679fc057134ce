"""Linear layers whose three matrix products take operands that were rounded to FP8.

    y = q(x) q(w)^T        dx = q(dy) q(w)        dw = q(dy)^T q(x)

Each product adds along one dimension, its inner one: K in the first, M in the second, tokens in the third. Scales that
cover a part of a row lie along the inner dimension, so a tensor of two products is rounded twice, each time from its
own values. Products are computed and added in float32, and their result is rounded to the dtype of the layer.

Dimensions: T tokens of this rank's micro-batch, K columns and M rows of the weight.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from slimrl.quantization.fp8 import TileShape
from slimrl.quantization.rounding import E4M3, round_tiles

WHOLE = 1 << 62
"""Edge of a tile that is at least as large as any matrix."""


class Rounding(ABC):
    """How the operands of one layer are rounded. Each method returns float32 for the two products of a tensor."""

    @abstractmethod
    def inputs(self, x_TK: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's input x, rounded for y = x w^T and for dw."""

    @abstractmethod
    def weight(self, w_MK: Tensor) -> tuple[Tensor, Tensor]:
        """The weight w, rounded for y and for dx."""

    @abstractmethod
    def gradient(self, dy_TM: Tensor) -> tuple[Tensor, Tensor]:
        """The output's gradient dy, rounded for dx and for dw."""


@dataclass(frozen=True, kw_only=True)
class TileRounding(Rounding):
    """Rounding of tiles, each by its present largest value."""

    inner: int
    """Elements along the inner dimension of a product that share a scale"""
    outer: int = 1
    """Elements across the inner dimension that share a scale, for activations and gradients"""
    weight_tile: TileShape | None = None
    """Tile of the weight; None for the tile of activations"""
    gradient_dtype: torch.dtype = E4M3
    power_of_two: bool = False

    def inputs(self, x_TK: Tensor) -> tuple[Tensor, Tensor]:
        return self._both(x_TK, E4M3)

    def weight(self, w_MK: Tensor) -> tuple[Tensor, Tensor]:
        if self.weight_tile is None:
            return self._both(w_MK, E4M3)
        rounded_MK = round_tiles(w_MK, self.weight_tile, power_of_two=self.power_of_two)
        return rounded_MK, rounded_MK

    def gradient(self, dy_TM: Tensor) -> tuple[Tensor, Tensor]:
        return self._both(dy_TM, self.gradient_dtype)

    def _both(self, values_MN: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The matrix rounded for a product whose inner dimension is the second, and for one whose inner dimension is
        the first."""
        row = round_tiles(values_MN, (self.outer, self.inner), dtype, power_of_two=self.power_of_two)
        if self.inner == self.outer:
            return row, row
        return row, round_tiles(values_MN, (self.inner, self.outer), dtype, power_of_two=self.power_of_two)


def fp8_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    rounding: Rounding,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: Any,
    **others: Any,
) -> Tensor:
    """The linear layer in FP8, in place of megatron-core's `linear_with_grad_accumulation_and_async_allreduce`, with
    its arguments.

    What it does behind a layer's own communication: the input of a column-parallel layer is gathered before it is
    rounded, and its gradient reduced after the product.

    Args:
        others: about buffers and fused kernels, which change no number.
    """
    if sequence_parallel:
        input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=tp_group)
    elif allreduce_dgrad:
        input = copy_to_tensor_model_parallel_region(input, group=tp_group)
    output: Tensor = _Fp8Linear.apply(input, weight, rounding)
    return output if bias is None else output + bias


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w_MK: Tensor, rounding: Rounding) -> Tensor:
        x_TK, input_TK = rounding.inputs(x.flatten(0, -2))
        weight_MK, w_MK_of_dx = rounding.weight(w_MK)
        ctx.save_for_backward(input_TK, w_MK_of_dx)
        ctx.rounding, ctx.dtypes = rounding, (x.dtype, w_MK.dtype)
        return (x_TK @ weight_MK.t()).to(x.dtype).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        x_TK, w_MK = ctx.saved_tensors
        row_TM, column_TM = ctx.rounding.gradient(dy.flatten(0, -2))
        dx = dw_MK = None
        if ctx.needs_input_grad[0]:
            dx = (row_TM @ w_MK).to(ctx.dtypes[0]).unflatten(0, dy.shape[:-1])
        if ctx.needs_input_grad[1]:
            dw_MK = (column_TM.t() @ x_TK).to(ctx.dtypes[1])
        return dx, dw_MK, None
