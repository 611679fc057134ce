"""The gated delta rule of an engine on a CPU, in place of kernels of sgl_kernel, of which PyPI has the CUDA wheel only.

A value head's state S [V, K] maps keys to values. With the decay a_t = exp(g_t) and the step b_t, token t does

    S_t = a_t S_{t-1} (I - b_t k_t k_t^T) + b_t v_t k_t^T        o_t = S_t q_t

(Gated Delta Networks, Yang et al. 2024, arXiv:2412.06464, equation 10). A chunk of tokens is computed at once from the
state before it (section 3.3 there). With G_i = g_1 + ... + g_i within the chunk and D_ij = exp(G_i - G_j) for i >= j,
what token i writes is row i of U:

    (I + lower(diag(b) K K^T * D)) U = diag(b) (V - diag(exp G) K S^T)

Decoding is a chunk of one token. The functions take the arguments of the kernels and return what they return. States
are read from the engine's pool and written back to it.

T tokens of all sequences, B sequences, N tokens of a chunk, G key heads, H value heads, K channels of a key, V of a
value.
"""

import torch
from torch import Tensor
from torch.nn.functional import softplus

CHUNK = 64
"""Number of tokens of a chunk."""


def gating(a_log_H: Tensor, a_TH: Tensor, b_TH: Tensor, dt_bias_H: Tensor) -> tuple[Tensor, Tensor]:
    """Log of each token's decay, at most 0, and its step, from 0 to 1: float32 [1, T, H]."""
    decay_TH = -a_log_H.float().exp() * softplus(a_TH.float() + dt_bias_H.float())
    return decay_TH[None], b_TH.float().sigmoid()[None]


def chunk_gated_delta_rule(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool,
) -> tuple[Tensor, None, None]:
    """Continue each sequence from its state.

    Args:
        q, k, v: [1, T, G, K], [1, T, G, K], [1, T, H, V], with H a multiple of G; queries and keys of any length.
        g, beta: [1, T, H], of `gating`.
        initial_state: the pool, [slots, H, V, K]; the sequences' slots are changed.
        initial_state_indices: [B], slot of each sequence.
        cu_seqlens: [B + 1], where each sequence begins, and T.

    Returns:
        [1, T, H, V] in the dtype of `q`, computed in float32; and two values that no caller uses on a CPU.
    """
    assert use_qk_l2norm_in_kernel
    assert not head_first
    query_THK, key_THK = (_l2norm(x[0]).repeat_interleave(v.shape[2] // x.shape[2], dim=1) for x in (q, k))
    inputs = (query_THK * q.shape[-1] ** -0.5, key_THK, v[0].float(), g[0, ..., None], beta[0, ..., None])
    output_THV = torch.empty(v.shape[1:], dtype=q.dtype)
    # The longest first, so that the sequences with tokens left are always the first ones.
    length_B, order = cu_seqlens.diff().sort(descending=True, stable=True)
    start_B, slot_B = cu_seqlens[:-1][order], initial_state_indices[order].long()
    state_BHVK = initial_state[slot_B].float()
    longest = int(length_B[0])
    for first in range(0, longest, CHUNK):
        count = int((length_B > first).sum())
        position_N = torch.arange(first, min(first + CHUNK, longest))
        exists_BN = position_N < length_B[:count, None]
        token_BN = (start_B[:count, None] + position_N).masked_fill_(~exists_BN, 0)
        # Zeros beyond a sequence's end leave its state as it is: no decay, and nothing written.
        hidden_BN11 = ~exists_BN[..., None, None]
        chunk = (x[token_BN].masked_fill_(hidden_BN11, 0).transpose(1, 2) for x in inputs)
        out_BHNV, state_BHVK[:count] = _advance(state_BHVK[:count], *chunk)
        output_THV[token_BN[exists_BN]] = out_BHNV.transpose(1, 2)[exists_BN].to(q.dtype)
    initial_state[slot_B] = state_BHVK.to(initial_state.dtype)
    return output_THV[None], None, None


def sigmoid_gating_delta_rule_update(
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    use_qk_l2norm_in_kernel: bool,
    softplus_beta: float,
    softplus_threshold: float,
) -> Tensor:
    """A decode step: `gating` of a and b, [T, H], and `chunk_gated_delta_rule` of one token per sequence."""
    # What `gating` computes with.
    assert (softplus_beta, softplus_threshold) == (1.0, 20.0)
    g, beta = gating(A_log, a, b, dt_bias)
    return chunk_gated_delta_rule(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        initial_state=initial_state_source,
        initial_state_indices=initial_state_indices,
        cu_seqlens=cu_seqlens,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
    )[0]


def _l2norm(x: Tensor) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)


def _advance(
    state_BHVK: Tensor, q_BHNK: Tensor, k_BHNK: Tensor, v_BHNV: Tensor, g_BHN1: Tensor, b_BHN1: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs [B, H, N, V] of a chunk, and the state behind it."""
    total_BHN1 = g_BHN1.cumsum(-2)
    # Above the diagonal exp() may overflow.
    decay_BHNN = (total_BHN1 - total_BHN1.mT).exp_().tril_()
    since_start_BHN1 = total_BHN1.exp()
    expected_BHNV = (k_BHNK * since_start_BHN1) @ state_BHVK.mT
    system_BHNN = b_BHN1 * (k_BHNK @ k_BHNK.mT) * decay_BHNN
    # Reads the entries below the diagonal alone, and takes 1 on it.
    written_BHNV = torch.linalg.solve_triangular(
        system_BHNN, b_BHN1 * (v_BHNV - expected_BHNV), upper=False, unitriangular=True
    )
    output = (q_BHNK * since_start_BHN1) @ state_BHVK.mT + ((q_BHNK @ k_BHNK.mT) * decay_BHNN) @ written_BHNV
    last_BH11 = total_BHN1[..., -1:, :]
    until_end_BHN1 = (last_BH11 - total_BHN1).exp()
    return output, state_BHVK * last_BH11.exp() + written_BHNV.mT @ (k_BHNK * until_end_BHN1)
