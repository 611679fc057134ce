"""Core attention of the local spec in plain torch: packed sequences, context parallelism, unequal head sizes.

1. A micro-batch is split into its sequences; each attends to itself, so that cost grows with the sum of squares.
2. Under context parallelism keys and values are gathered from all ranks and put back into sequence order; this rank's
   queries stay in their zigzag chunks and attend to all earlier positions of their sequence.

T tokens on this rank, H query heads, G key-value heads, D channels of a key, E of a value.
"""

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_patches.zigzag import zigzag_indices


class CoreAttention(MegatronModule):
    """Replaces megatron.core's DotProductAttention; same arguments."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        channels = k_channels or config.kv_channels
        self.scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(channels)
        self.cp_group = pg_collection.cp
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Causal attention.

        Args:
            query, key, value: packed [T, H, D], [T, G, D], [T, G, E], or [T, B, ...] for a batch of equal lengths.
            packed_seq_params: boundaries of the packed sequences before context-parallel sharding, or None.

        Returns:
            [T, H * E], or [T, B, H * E].

        Raises:
            ValueError: a bias, or context parallelism without packed sequences.
        """
        if attention_bias is not None:
            raise ValueError("this attention takes no bias")
        if packed_seq_params is None:
            if self.cp_group.size() > 1:
                raise ValueError("context parallelism needs packed sequences")
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            return self._attend(q, k, v, None).permute(2, 0, 1, 3).flatten(2)
        bounds = packed_seq_params.cu_seqlens_q_padded
        bounds = (packed_seq_params.cu_seqlens_q if bounds is None else bounds).tolist()
        assert bounds[-1] == len(query) * self.cp_group.size(), (bounds[-1], len(query))
        return self._packed(query, key, value, bounds)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, bounds: list[int]) -> Tensor:
        ranks, rank = self.cp_group.size(), self.cp_group.rank()
        lengths = [end - start for start, end in itertools.pairwise(bounds)]
        masks: list[Tensor | None] = [None] * len(lengths)
        if ranks > 1:
            order = torch.cat([zigzag_indices(bounds, ranks, r) for r in range(ranks)]).argsort().to(query.device)
            gathered = (gather_from_sequence_parallel_region(x, group=self.cp_group) for x in (key, value))
            key, value = (x.index_select(0, order) for x in gathered)
            masks = [_causal_mask(length, ranks, rank, query.device) for length in lengths]
        # split() has one backward; each slice would allocate the whole gradient.
        queries = query.split([length // ranks for length in lengths])
        outputs = []
        for q, k, v, mask in zip(queries, key.split(lengths), value.split(lengths), masks, strict=True):
            q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
            outputs.append(self._attend(q, k, v, mask).squeeze(0).transpose(0, 1))
        return torch.cat(outputs).flatten(1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=q.shape[1] != k.shape[1],
        )


def _causal_mask(length: int, ranks: int, rank: int, device: torch.device) -> Tensor:
    """bool [length / ranks, length]: tokens of a sequence that each query of this rank sees."""
    positions = zigzag_indices([0, length], ranks, rank).to(device)
    return positions[:, None] >= torch.arange(length, device=device)
