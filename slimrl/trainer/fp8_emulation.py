"""Emulates FP8 training: rounds around the linear layers that Transformer Engine would compute in FP8.

Those of attention, MLPs, experts and shared experts, and of layers for multi-token prediction; not the router, the
embedding, the output layer, norms and core attention. docs/algorithms.md#emulation says what that tells of FP8
on a GPU.
"""

import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from megatron.core.fp8_utils import is_first_last_bf16_layer
from megatron.core.models.gpt import GPTModel
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from slimrl import device
from slimrl.config.env_vars import FP8_SCALES
from slimrl.config.schema.precision import Fp8Scaling
from slimrl.models.hf_config import FP8_BLOCK
from slimrl.quantization.rounding import E5M2
from slimrl.trainer.fp8_delayed import delayed_roundings
from slimrl.trainer.fp8_linear import WHOLE, Rounding, TileRounding, fp8_linear

MXFP8_ELEMENTS = 32
"""Number of elements that share a scale in MXFP8."""


def emulate_fp8(chunk: GPTModel, config: TransformerConfig, scaling: Fp8Scaling) -> None:
    """Make the linear layers of a chunk, which are Megatron's local ones, round as a value of `trainer.fp8` says."""
    layers = list(_linear_layers(chunk, config))
    for layer, rounding in zip(layers, _roundings(chunk, config, scaling, len(layers)), strict=True):
        if isinstance(layer, Linear):
            layer.forward = partial(_replicated, layer, rounding)
        else:
            layer._forward_impl = partial(fp8_linear, rounding=rounding)


def _linear_layers(chunk: GPTModel, config: TransformerConfig) -> Iterator[Any]:
    blocks: list[nn.Module] = [
        layer for layer in chunk.decoder.layers if not is_first_last_bf16_layer(config, layer.layer_number - 1)
    ]
    if getattr(chunk, "mtp", None) is not None:
        blocks.append(chunk.mtp)
    for block in blocks:
        for module in block.modules():
            if isinstance(module, ColumnParallelLinear | RowParallelLinear | Linear):
                yield module


def _roundings(chunk: GPTModel, config: TransformerConfig, scaling: Fp8Scaling, count: int) -> Sequence[Rounding]:
    """The rounding of each layer of a chunk."""
    if scaling is Fp8Scaling.delayed:
        return delayed_roundings(chunk, config, count, device.compute_device())
    rounding = {
        # As Transformer Engine's Float8BlockScaling reads the variable; slimrl sets it in the trainer.
        Fp8Scaling.blockwise: TileRounding(
            inner=FP8_BLOCK[1], weight_tile=FP8_BLOCK, power_of_two=os.environ.get(FP8_SCALES, "0") != "1"
        ),
        Fp8Scaling.mxfp8: TileRounding(inner=MXFP8_ELEMENTS, power_of_two=True),
        Fp8Scaling.tensorwise: TileRounding(inner=WHOLE, outer=WHOLE, gradient_dtype=E5M2),
    }[scaling]
    return [rounding] * count


def _replicated(layer: Linear, rounding: Rounding, x: Tensor) -> tuple[Tensor, None]:
    """`forward` of a layer that each tensor-parallel rank holds whole."""
    output = fp8_linear(
        x, layer.weight, layer.bias, rounding=rounding, allreduce_dgrad=False, sequence_parallel=False, tp_group=None
    )
    return output, None
