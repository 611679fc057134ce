"""The gates of Qwen3-Next, of which SGLang has Triton kernels alone: on a delta net's result, and on a shared expert's.

Each function replaces the one of SGLang that it is named after, and computes in float32.
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
