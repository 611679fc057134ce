"""Rotary embedding of packed sequences."""

import functools
import itertools
from typing import Any

import torch
from torch import Tensor

from megatron_patches.patching import patch_attr
from megatron_patches.zigzag import zigzag_indices


def rotate_packed_sequences_at_once() -> None:
    """models/common/embeddings/rope_utils.py rotates packed sequences one by one where Transformer Engine does not.

    That takes some 20 operations for each sequence, layer, query and key. Here the frequencies of each token are
    gathered, and all tokens rotated together, to the same bits. On any device: multi-latent attention has no other way
    on a GPU.
    """
    from megatron.core.models.common.embeddings import rope_utils

    one_by_one = rope_utils._apply_rotary_pos_emb_thd

    @functools.wraps(one_by_one)
    def at_once(
        t: Tensor, cu_seqlens: Tensor, freqs: Tensor, *args: Any, cp_group: Any = None, **kwargs: Any
    ) -> Tensor:
        bounds = cu_seqlens.tolist()
        if cp_group is None or len(freqs) == bounds[-1]:
            # Refused by the original; frequencies of the whole micro-batch, which it gathers too.
            return one_by_one(t, cu_seqlens, freqs, *args, cp_group=cp_group, **kwargs)
        positions = packed_positions(bounds, cp_group.size(), cp_group.rank()).to(freqs.device)
        rotated = rope_utils._apply_rotary_pos_emb_bshd(t.unsqueeze(1), freqs[positions], *args, **kwargs)
        return rotated.squeeze(1)

    patch_attr(rope_utils, "_apply_rotary_pos_emb_thd", at_once)


def packed_positions(bounds: list[int], ranks: int, rank: int) -> Tensor:
    """Position within its sequence of each token of one context-parallel rank.

    Args:
        bounds: S + 1 boundaries of the sequences in the whole micro-batch.

    Returns:
        int64 [bounds[-1] / ranks], in the rank's order.
    """
    starts = torch.tensor(bounds[:-1])
    lengths = torch.tensor([(end - start) // ranks for start, end in itertools.pairwise(bounds)])
    return zigzag_indices(bounds, ranks, rank) - starts.repeat_interleave(lengths)
