"""OLMoE's norms of queries and keys over all heads, of which each tensor-parallel rank of an engine holds some.

SGLang gives every rank norms as wide as the model, which fit one rank that has as many key-value heads as heads.
"""

from functools import partial
from typing import Any

from torch import Tensor


def after_init(result: None, attention: Any, *args: Any, **kwargs: Any) -> None:
    """Hook of OlmoeAttention.__init__: MiniMax-M2's norms, which load this rank's part, where SGLang's do not fit."""
    if attention.num_heads == attention.total_num_heads == attention.total_num_kv_heads:
        return
    from sglang.srt.models.minimax_m2 import MiniMaxM2RMSNormTP

    for name, heads in (("q_norm", attention.total_num_heads), ("k_norm", attention.total_num_kv_heads)):
        eps = getattr(attention, name).variance_epsilon
        norm = MiniMaxM2RMSNormTP(heads * attention.head_dim, heads, eps=eps)
        norm.forward = partial(forward, norm)
        setattr(attention, name, norm)


def forward(norm: Any, x: Tensor) -> Tensor:
    """MiniMaxM2RMSNormTP.forward without torch's compiler, in float32.

    Takes this rank's queries or keys [T, heads * D].
    """
    from sglang.srt.layers.dp_attention import attn_tp_all_reduce

    wide = x.float()
    squares_T1 = wide.square().mean(-1, keepdim=True)
    if norm.attn_tp_size > 1:
        squares_T1 = attn_tp_all_reduce(squares_T1) / norm.attn_tp_size
    return (wide * (squares_T1 + norm.variance_epsilon).rsqrt() * norm.weight.float()).to(x.dtype)
