"""Delayed scaling: tensors are rounded with a scale from their largest values in earlier micro-batches.

1. Each operand of each layer has a scale, 1 at the start. While it is rounded, its largest value is recorded.
2. After the forward pass of a micro-batch the recorded values of inputs and weights are reduced over the group, enter
   a history, and give the next scales. Those of gradients do so before the next backward pass.
3. Passes without gradients record, but change no scale.

The rule is Transformer Engine's DelayedScaling. It lives in the process: a resumed run begins at 1 again.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from slimrl.quantization.rounding import E4M3, E5M2, round_scaled
from slimrl.trainer.fp8_linear import Rounding


class DelayedScales:
    """Scales of N tensors and the histories of their largest values."""

    def __init__(self, config: TransformerConfig, dtype: torch.dtype, count: int, device: torch.device) -> None:
        self._config, self._dtype = config, dtype
        self.scale_N = torch.ones(count, device=device)
        self.absmax_N = torch.zeros(count, device=device)
        self._history_LN = torch.zeros((max(1, config.fp8_amax_history_len), count), device=device)

    def round(self, index: int, values: Tensor) -> Tensor:
        """Round one of the tensors, and record its largest value."""
        if values.numel():
            self.absmax_N[index] = torch.maximum(self.absmax_N[index], values.abs().amax())
        return round_scaled(values, self.scale_N[index], self._dtype)

    def update(self) -> None:
        """New scales from what was recorded; every rank of the group calls it equally often."""
        if mpu.model_parallel_is_initialized():
            group = mpu.get_amax_reduction_group(
                with_context_parallel=True, tp_only_amax_red=self._config.tp_only_amax_red
            )
            dist.all_reduce(self.absmax_N, op=dist.ReduceOp.MAX, group=group)
        self._history_LN = torch.cat([self._history_LN[1:], self.absmax_N[None]])
        absmax_N = self._history_LN.amax(0) if self._config.fp8_amax_compute_algo == "max" else self.absmax_N
        scale_N = absmax_N / torch.finfo(self._dtype).max * 2.0**self._config.fp8_margin
        usable_N = torch.isfinite(absmax_N) & (absmax_N > 0)
        self.scale_N = torch.where(usable_N, scale_N, self.scale_N)
        self.absmax_N = torch.zeros_like(self.absmax_N)


class DelayedRounding(Rounding):
    """Delayed scaling in one layer of a model chunk."""

    def __init__(self, forward: DelayedScales, backward: DelayedScales, index: int) -> None:
        self._forward, self._backward, self._index = forward, backward, index

    def inputs(self, x_TK: Tensor) -> tuple[Tensor, Tensor]:
        rounded_TK = self._forward.round(2 * self._index, x_TK)
        return rounded_TK, rounded_TK

    def weight(self, w_MK: Tensor) -> tuple[Tensor, Tensor]:
        rounded_MK = self._forward.round(2 * self._index + 1, w_MK)
        return rounded_MK, rounded_MK

    def gradient(self, dy_TM: Tensor) -> tuple[Tensor, Tensor]:
        rounded_TM = self._backward.round(self._index, dy_TM)
        return rounded_TM, rounded_TM


def delayed_roundings(
    chunk: nn.Module, config: TransformerConfig, count: int, device: torch.device
) -> list[DelayedRounding]:
    """The rounding of `count` layers of a chunk, whose passes then update the scales."""
    forward = DelayedScales(config, E4M3, 2 * count, device)
    backward = DelayedScales(config, E5M2, count, device)

    def after_forward(module: nn.Module, args: Any, output: Tensor) -> None:
        if torch.is_grad_enabled():
            forward.update()
            if output.requires_grad:
                output.register_hook(lambda gradient: backward.update())

    chunk.register_forward_hook(after_forward)
    return [DelayedRounding(forward, backward, index) for index in range(count)]
