"""Products of a decode step with large matrices, from a copy of each weight in the layout that oneDNN reads fastest.

A decode step multiplies a few rows with every weight of the model. For so few rows torch's own product (MKL) spends
about as long on bringing the weight into a layout of its own as on the product. oneDNN takes a weight that is in its
layout already. Each weight is copied into it at its first product, and all copies are dropped when the weights change.
They take as much memory again as the weights of these layers.

More rows, as in a prefill, go to the original: there the layout saves little, and oneDNN compiles code for each number
of rows that it has not seen.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MAX_ROWS = 64
"""Most rows of a product that uses the copies."""
MIN_ELEMENTS = 1 << 18
"""Elements of the smallest weight that is copied. A decode step with smaller ones is calls, and hardly arithmetic."""

_UNQUANTIZED = ("UnquantizedEmbeddingMethod", "UnquantizedLinearMethod")
"""Methods of an output layer, by the name of their class, whose weight is what it multiplies with."""

UPDATES = (
    "load_weights_from_distributed",
    "update_weights_from_disk",
    "update_weights_from_ipc",
    "update_weights_from_tensor",
)
"""Methods of SGLang's WeightUpdater that change an engine's weights. No forward pass runs meanwhile."""


class PackedWeights:
    """The copies of one process. Weights are told apart by their address, since tied layers share one."""

    def __init__(self) -> None:
        self._copies: dict[int, Tensor] = {}

    def drop(self) -> None:
        self._copies.clear()

    def product(self, rows_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        """rows @ weight^T + bias, [T, O] in their dtype, for arguments that `fits` accepts."""
        copy = self._copies.get(weight_OI.data_ptr())
        if copy is None:
            copy = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach(), MAX_ROWS)
            self._copies[weight_OI.data_ptr()] = copy
        product: Tensor = torch.ops.mkldnn._linear_pointwise(rows_TI, copy, bias_O, "none", [], "")
        return product


packed_weights = PackedWeights()


def fits(rows: Tensor, weight: Tensor) -> bool:
    """Whether the copies serve a product."""
    return (
        rows.ndim == 2
        and 0 < len(rows) <= MAX_ROWS
        and rows.dtype == weight.dtype
        and rows.dtype in packed_dtypes()
        and weight.numel() >= MIN_ELEMENTS
        and weight.is_contiguous()
    )


@functools.cache
def packed_dtypes() -> tuple[torch.dtype, ...]:
    """Dtypes of which oneDNN takes packed weights here; not every CPU has what it needs for bfloat16."""
    if not torch.backends.mkldnn.is_available():
        return ()
    return (torch.float32, torch.bfloat16) if torch.ops.mkldnn._is_mkldnn_bf16_supported() else (torch.float32,)


def around_apply(
    original: Callable[..., Tensor], method: Any, layer: Any, x: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Wraps UnquantizedLinearMethod.apply."""
    if not fits(x, layer.weight):
        return original(method, layer, x, bias)
    return packed_weights.product(x, layer.weight, bias)


def around_lm_head(
    original: Callable[..., Tensor],
    processor: Any,
    hidden_states: Tensor,
    lm_head: Any,
    embedding_bias: Tensor | None = None,
    **rest: Any,
) -> Tensor:
    """Wraps LogitsProcessor._compute_lm_head, which multiplies with the output layer's weight, without a bias."""
    plain = (
        type(getattr(lm_head, "quant_method", None)).__name__ in _UNQUANTIZED
        and not hasattr(lm_head, "apply_lora")
        and processor.rl_on_policy_target is None
        and (lm_head.weight.dtype == torch.float32 or not processor.use_fp32_lm_head)
    )
    if not (plain and fits(hidden_states, lm_head.weight)):
        return original(processor, hidden_states, lm_head, embedding_bias, **rest)
    return packed_weights.product(hidden_states, lm_head.weight, None)


def before_update(*args: Any, **kwargs: Any) -> None:
    """Hook of each of UPDATES: the next forward pass, after it, packs the weights anew."""
    packed_weights.drop()
