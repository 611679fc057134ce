"""Gates and norms of Qwen3-Next and Qwen3.5, of which SGLang has kernels alone, and the parts of a delta net's input.

Each function stands for the one of SGLang that it is named after, and computes in float32.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu


def rms_norm_gated(
    x: Tensor, gate: Tensor, weight: Tensor, bias: None, activation: str, *, eps: float, **unused: Any
) -> Tensor:
    """The RMS norm of `x` times SiLU of the gate, which has its shape."""
    assert bias is None
    assert activation == "silu"
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight * silu(gate.float())).to(x.dtype)


def fused_gate_sigmoid_mul_add(hidden_TH: Tensor, gate_weight_H: Tensor, shared_TH: Tensor, output_TH: Tensor) -> None:
    """Add the shared expert's result, times a number in 0..1 of each token, to that of the routed experts."""
    gate_T1 = (hidden_TH.float() @ gate_weight_H.float()).sigmoid()[:, None]
    output_TH += (gate_T1 * shared_TH).to(output_TH.dtype)


def gated_norm(norm: Any, x: Tensor, z: Tensor) -> Tensor:
    """Replaces the forward of Qwen3.5's norm of a delta net's result."""
    assert norm.norm_before_gate
    assert norm.group_size is None
    assert norm.activation in ("swish", "silu")
    return rms_norm_gated(x, z, norm.weight, None, "silu", eps=norm.eps)


def fused_sigmoid_mul(attended_TC: Tensor, gate_TC: Tensor) -> None:
    """Multiply attention's result by the sigmoid of its gate, in place."""
    attended_TC.mul_(gate_TC.float().sigmoid().to(attended_TC.dtype))


def fused_qk_gemma_rmsnorm_with_gate(
    query_gate: Tensor, key: Tensor, query_weight: Tensor, key_weight: Tensor, eps: float, dim: int, num_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Zero-centred norms of each head's queries and keys, where each query head is followed by its gate.

    Returns:
        Queries, keys and gates, each [tokens * its heads, dim].
    """
    query, gate = query_gate.unflatten(-1, (num_heads, 2, dim)).unbind(-2)
    normed = (_zero_centred_norm(x, weight, eps, dim) for x, weight in ((query, query_weight), (key, key_weight)))
    return *normed, gate.reshape(-1, dim).contiguous()


def fused_qkvzba_split_reshape_cat_contiguous(
    qkvz: Tensor, ba: Tensor, key_heads: int, value_heads: int, key_dim: int, value_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A delta net's queries, keys and values [tokens, channels], gates [tokens, heads, dim], betas and alphas."""
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    beta, alpha = ba.split([value_heads, value_heads], dim=-1)
    gates = qkvz[:, channels:].unflatten(-1, (value_heads, value_dim))
    return qkvz[:, :channels].contiguous(), gates.contiguous(), beta.contiguous(), alpha.contiguous()


def _zero_centred_norm(x: Tensor, weight: Tensor, eps: float, dim: int) -> Tensor:
    wide = x.reshape(-1, dim).float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * (1.0 + weight.float())).to(x.dtype)
