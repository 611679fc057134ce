"""MiniMax-M2's norms of queries and keys over all heads, which SGLang's kernels compute on other devices."""

from typing import Any

from torch import Tensor

from slimrl.engines.plugin import olmoe_norms


def forward(norms: Any, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Replaces MiniMaxM2QKRMSNorm.forward. Takes this rank's queries and keys [T, heads * D]."""
    return olmoe_norms.forward(norms._q_norm, q), olmoe_norms.forward(norms._k_norm, k)
