"""Experts in two batched products instead of a Python loop over them.

Tokens are sorted by expert and padded to the busiest expert's load, which pays where each has a few tokens, as in
decode. The original runs where a loop is as good (a handful of tokens, or many for each expert), where the load is so
uneven that padding would more than quadruple the work, and where the layer has something this file does not know.
A rank of an expert-parallel engine computes the pairs of its own experts; SGLang adds the ranks' results.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

_MAX_PADDING = 4
_MIN_PAIRS = 8
"""Fewest pairs of token and expert for which the batched products are used."""
_MAX_LOAD = 128
"""Most pairs per expert, on average, for which the batched products are used."""


def around_forward(
    original: Callable[..., Tensor], layer: Any, hidden_TH: Tensor, topk_output: Any, config: Any
) -> Tensor:
    """Wraps sglang.srt.layers.moe.fused_moe_native.moe_forward_native, which knows nothing of other ranks' experts."""
    if len(layer.w13_weight) == layer.num_experts:
        return _forward(original, layer, hidden_TH, topk_output, config)
    weights_TK, experts_TK = topk_output[:2]
    outputs_TKH = hidden_TH.new_zeros(*experts_TK.shape, hidden_TH.shape[1])
    # SGLang numbers a rank's experts from 0 and writes -1 for those of other ranks.
    token_P, choice_P = (experts_TK >= 0).nonzero(as_tuple=True)
    if len(token_P):
        experts_P1 = experts_TK[token_P, choice_P][:, None]
        pairs = (weights_TK.new_ones(len(token_P), 1), experts_P1, None)
        outputs_TKH[token_P, choice_P] = _forward(original, _held_experts(layer), hidden_TH[token_P], pairs, config)
    return (outputs_TKH.to(weights_TK.dtype) * weights_TK[..., None]).sum(1).to(hidden_TH.dtype)


def _held_experts(layer: Any) -> SimpleNamespace:
    names = ("w13_weight", "w2_weight", "w13_weight_bias", "w2_weight_bias")
    held = {name: getattr(layer, name, None) for name in names}
    return SimpleNamespace(num_experts=len(layer.w13_weight), **held)


def _forward(original: Callable[..., Tensor], layer: Any, hidden_TH: Tensor, topk_output: Any, config: Any) -> Tensor:
    plain = (
        config.activation == "silu"
        and config.gemm1_alpha is None
        and not config.apply_router_weight_on_input
        and getattr(layer, "w13_weight_bias", None) is None
        and getattr(layer, "w2_weight_bias", None) is None
    )
    weights_TK, experts_TK = topk_output[:2]
    pairs, num_experts = experts_TK.numel(), len(layer.w13_weight)
    if plain and _MIN_PAIRS <= pairs <= _MAX_LOAD * num_experts:
        loads_E = torch.bincount(experts_TK.flatten(), minlength=num_experts)
        capacity = int(loads_E.max())
        if capacity * num_experts <= _MAX_PADDING * pairs:
            return experts_forward(
                hidden_TH, weights_TK, experts_TK, layer.w13_weight, layer.w2_weight, loads_E, capacity
            )
    return original(layer, hidden_TH, topk_output, config)


def experts_forward(
    hidden_TH: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    gate_up_EFH: Tensor,
    down_EHI: Tensor,
    loads_E: Tensor,
    capacity: int,
) -> Tensor:
    """Weighted sum of each token's experts.

    Args:
        weights_TK: router weight of each of a token's K experts.
        gate_up_EFH: rows [gate; up] of each expert, F = 2 I.
        loads_E: tokens of each expert.
        capacity: the largest of them.

    Returns:
        [T, H] in the dtype of `hidden_TH`.
    """
    num_experts, tokens, topk = len(loads_E), *experts_TK.shape
    expert_P = experts_TK.flatten().long()
    order_P = expert_P.argsort(stable=True)
    expert_P = expert_P[order_P]
    first_E = loads_E.cumsum(0) - loads_E
    slot_P = expert_P * capacity + torch.arange(len(expert_P)) - first_E[expert_P]
    padded = hidden_TH.new_zeros(num_experts * capacity, hidden_TH.shape[1])
    padded[slot_P] = hidden_TH[order_P // topk]
    gate_up = torch.bmm(padded.view(num_experts, capacity, -1), gate_up_EFH.transpose(1, 2))
    gate, up = gate_up.chunk(2, dim=-1)
    out = torch.bmm(silu(gate).mul_(up), down_EHI.transpose(1, 2)).flatten(0, 1)
    out_PH = torch.empty(tokens * topk, out.shape[1], dtype=out.dtype)
    out_PH[order_P] = out[slot_P]
    out_TKH = out_PH.view(tokens, topk, -1).to(weights_TK.dtype)
    return (out_TKH * weights_TK[..., None]).sum(1).to(hidden_TH.dtype)
