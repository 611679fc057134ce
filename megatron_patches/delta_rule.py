"""The gated delta rule in plain torch, in place of the kernels of flash-linear-attention.

A head's state S [K, V] maps keys to values (Yang et al. 2024, arXiv:2412.06464, equation 10). With the decay
a_t = exp(g_t) and the step b_t, token t does

    S_t = a_t (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T        o_t = S_t^T q_t

A sequence is computed in chunks, within which all updates follow from one triangular system (section 3.3 there). With
the chunk's summed decays G_i = g_1 + ... + g_i and D_ij = exp(G_i - G_j) for i >= j, what token i writes is row i of U:

    (I + lower(diag(b) K K^T * D)) U = diag(b) (V - diag(exp G) K S)

The functions take the arguments of the kernels that megatron-core calls, and return what they return.
B sequences (1 if packed), T tokens, H heads, K channels of a key, V of a value, C channels of a convolution.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
"""Number of tokens of a chunk."""


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None = None, **unused: Any
) -> tuple[Tensor, None]:
    """Linear attention; states begin at zero with each sequence.

    Args:
        q, k, v: [B, T, H, K], [B, T, H, K], [B, T, H, V]; queries and keys of length 1.
        g: log of the decay, [B, T, H], at most 0.
        beta: [B, T, H].
        cu_seqlens: boundaries of packed sequences, or None.

    Returns:
        [B, T, H, V] in the dtype of `q`, computed in float32; and no state.
    """
    return _by_sequence(_delta_rule, cu_seqlens, q, k, v, g, beta).to(q.dtype), None


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """SiLU of a convolution along the sequence with one filter per channel, over this token and those before it.

    Args:
        x: [B, T, C].
        weight: [C, width].
        cu_seqlens: boundaries of packed sequences, or None.
    """
    before = weight.shape[1] - 1

    def convolve(x_BTC: Tensor) -> Tensor:
        padded_BCT = F.pad(x_BTC.transpose(1, 2), (before, 0))
        return F.silu(F.conv1d(padded_BCT, weight[:, None], bias, groups=len(weight))).transpose(1, 2)

    return _by_sequence(convolve, cu_seqlens, x), None


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """The vectors scaled to length 1 along the last dimension."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def _by_sequence(function: Callable[..., Tensor], cu_seqlens: Tensor | None, *inputs: Tensor) -> Tensor:
    """Apply the function to each packed sequence, one after the other along dimension 1."""
    if cu_seqlens is None:
        return function(*inputs)
    lengths = [length for length in cu_seqlens.diff().tolist() if length]
    # split() has one backward; each slice would allocate the whole gradient.
    return torch.cat(
        [function(*parts) for parts in zip(*(x.split(lengths, dim=1) for x in inputs), strict=True)], dim=1
    )


def _delta_rule(*inputs: Tensor) -> Tensor:
    """The gated delta rule's output for whole sequences, float32 [B, T, H, V]."""
    q_BHTK, k_BHTK, v_BHTV, g_BHT, beta_BHT = (x.float().transpose(1, 2) for x in inputs)
    q_BHTK = q_BHTK * q_BHTK.shape[-1] ** -0.5
    state_BHKV = k_BHTK.new_zeros(*k_BHTK.shape[:2], k_BHTK.shape[-1], v_BHTV.shape[-1])
    outputs = []
    for q, k, v, g, b in zip(*(x.split(CHUNK, dim=2) for x in (q_BHTK, k_BHTK, v_BHTV, g_BHT, beta_BHT)), strict=True):
        total = g.cumsum(-1)
        later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
        # Masked before exp(), which could overflow there.
        decay = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()
        since_start = total.exp()[..., None]
        expected = (k * since_start) @ state_BHKV
        system = b[..., None] * (k @ k.mT) * decay
        # Reads the entries below the diagonal alone, and takes 1 on it.
        written = torch.linalg.solve_triangular(system, b[..., None] * (v - expected), upper=False, unitriangular=True)
        outputs.append((q * since_start) @ state_BHKV + ((q @ k.mT) * decay) @ written)
        until_end = (total[..., -1:] - total).exp()[..., None]
        state_BHKV = state_BHKV * total[..., -1, None, None].exp() + (k * until_end).mT @ written
    return torch.cat(outputs, dim=2).transpose(1, 2)
