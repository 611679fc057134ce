"""The short causal convolution before a gated delta rule, in place of kernels of sgl_kernel.

Output channel c of token t is SiLU of w[c, 0] x[t - W + 1, c] + ... + w[c, W - 1] x[t, c]. The pool has, for each
sequence, its last W - 1 inputs, which stand before its next token. The functions take the arguments of the kernels.

T tokens of all sequences, B sequences, C channels, W taps of a filter.
"""

import torch
from torch import Tensor
from torch.nn.functional import silu


def causal_conv1d_fn(
    x_CT: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    *,
    activation: str,
    conv_states: Tensor,
    has_initial_state: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    seq_lens_cpu: list[int],
) -> Tensor:
    """The convolution's output in a prefill, [C, T].

    Args:
        conv_states: the pool, [slots, C, W - 1]; the sequences' slots are changed.
        has_initial_state: [B], whether a sequence continues; inputs before the others are zero.
        cache_indices: [B], slot of each sequence.
        query_start_loc: [B + 1], where each sequence begins, and T.
        seq_lens_cpu: its lengths.
    """
    assert activation == "silu"
    before = weight_CW.shape[1] - 1
    slot_B, lengths = cache_indices.long(), torch.tensor(seq_lens_cpu)
    # Each sequence with its past inputs before it, one after the other.
    sequence_T = torch.arange(len(lengths)).repeat_interleave(lengths)
    first_T = torch.arange(len(sequence_T)) + before * sequence_T
    begin_B = query_start_loc.long() + before * torch.arange(len(query_start_loc))
    past = torch.arange(before)
    inputs = x_CT.new_empty(len(sequence_T) + before * len(lengths), len(x_CT))
    inputs[first_T + before] = x_CT.T[: len(sequence_T)]
    kept_BCP = conv_states[slot_B].masked_fill_(~has_initial_state[:, None, None], 0)
    inputs[begin_B[:-1, None] + past] = kept_BCP.mT.to(x_CT.dtype)
    conv_states[slot_B] = inputs[begin_B[1:, None] - before + past].mT.to(conv_states.dtype)
    taps = (inputs[first_T + tap].float() * weight for tap, weight in enumerate(weight_CW.T))
    return _activated(sum(taps), bias_C, x_CT.dtype).T


def causal_conv1d_update(
    x_BC: Tensor,
    conv_states: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    activation: str,
    *,
    conv_state_indices: Tensor,
) -> Tensor:
    """The convolution's output in a decode step with one token of each sequence, [B, C]; `conv_states` as in
    `causal_conv1d_fn`."""
    assert activation == "silu"
    slot_B = conv_state_indices.long()
    window_BCW = torch.cat([conv_states[slot_B].to(x_BC.dtype), x_BC[..., None]], dim=-1)
    conv_states[slot_B] = window_BCW[..., 1:].to(conv_states.dtype)
    return _activated((window_BCW.float() * weight_CW).sum(-1), bias_C, x_BC.dtype)


def _activated(sums: Tensor, bias_C: Tensor | None, dtype: torch.dtype) -> Tensor:
    return silu(sums if bias_C is None else sums + bias_C).to(dtype)
