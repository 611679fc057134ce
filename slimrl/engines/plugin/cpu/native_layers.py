"""SGLang's norm and rotary embedding in plain torch, in a third of the operations.

Without a GPU a decode step of a small model takes the time of its operations' calls, not of their arithmetic. Where an
engine computes in float32 none of SGLang's conversions are needed, and queries and keys can be rotated together; the
original runs everywhere else.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm


def around_rms_norm(
    original: Callable[..., Any],
    norm: Any,
    x: Tensor,
    residual: Tensor | None = None,
    post_residual_addition: Tensor | None = None,
    quant_linear: Any = None,
) -> Any:
    """Wraps RMSNorm.forward_native: the norm of x, or that of x + residual and their sum."""
    plain = (
        x.dtype == norm.weight.dtype == torch.float32
        and norm.override_orig_dtype in (None, torch.float32)
        and norm.variance_size_override is None
        and post_residual_addition is None
    )
    if not plain:
        return original(norm, x, residual, post_residual_addition, quant_linear)
    if residual is not None:
        x = x + residual
    normed = rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)
    return normed if residual is None else (normed, x)


def around_rotary(
    original: Callable[..., tuple[Tensor, Tensor]],
    rotary: Any,
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    offsets: Tensor | None = None,
    fused_set_kv_buffer_arg: Any = None,
) -> tuple[Tensor, Tensor]:
    """Wraps RotaryEmbedding.forward_native.

    Args:
        query, key: [T, heads * D] each; pairs of channels are D / 2 apart.

    Returns:
        As many columns each, of one buffer: not contiguous.
    """
    plain = (
        query.dtype == key.dtype == rotary.cos_sin_cache.dtype == torch.float32
        and rotary.is_neox_style
        and rotary.rotary_dim == rotary.head_size
        and query.ndim == 2
        and offsets is None
        and fused_set_kv_buffer_arg is None
    )
    if not plain:
        return original(rotary, positions, query, key, offsets, fused_set_kv_buffer_arg)
    heads_THD = torch.cat([query, key], dim=1).unflatten(1, (-1, rotary.head_size))
    cos, sin = rotary.cos_sin_cache[positions.flatten()].unsqueeze(1).chunk(2, dim=-1)
    first, second = heads_THD.chunk(2, dim=-1)
    rotated = torch.empty_like(heads_THD)
    to_first, to_second = rotated.chunk(2, dim=-1)
    torch.mul(first, cos, out=to_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=to_second).addcmul_(first, sin)
    rotated_query, rotated_key = rotated.flatten(1).split([query.shape[1], key.shape[1]], dim=1)
    return rotated_query, rotated_key
