"""MiniMax-M2's norms of queries and keys over all heads, which SGLang's kernels compute on other devices."""

from typing import Any

import torch
from torch import Tensor


def forward(norms: Any, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Replaces MiniMaxM2QKRMSNorm.forward. Takes this rank's queries and keys [T, heads * D]; computes in float32."""
    from sglang.srt.layers.dp_attention import attn_tp_all_reduce

    squares_2T1 = torch.stack([x.float().square().mean(-1, keepdim=True) for x in (q, k)])
    if norms._world_size > 1:
        squares_2T1 = attn_tp_all_reduce(squares_2T1) / norms._world_size
    scales = torch.rsqrt(squares_2T1 + norms._eps)
    own = zip((q, k), (norms._q_norm, norms._k_norm), scales, strict=True)
    q_normed, k_normed = ((x.float() * scale * norm.weight.float()).to(x.dtype) for x, norm, scale in own)
    return q_normed, k_normed
