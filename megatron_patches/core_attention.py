"""Core attention of the local spec in plain torch: packed sequences, context parallelism, unequal head sizes, sliding
windows, sinks.

1. A micro-batch is split into its sequences; each attends to itself, so that cost grows with the sum of squares.
   Without context parallelism, short ones of about one length are padded and share a call, which takes less time than
   as many calls.
2. Under context parallelism keys and values are gathered from all ranks and put back into sequence order; this rank's
   queries stay in their zigzag chunks and attend to the earlier positions of their sequence.
3. A sink is a learned score of each head, a further term of the softmax's denominator (gpt-oss). PyTorch's kernel has
   none, so it is the score of a further key whose value is 0: a further channel is 1 in that key, 0 in the others, and
   the sink in every query.

T tokens on this rank, H query heads, G key-value heads, D channels of a key, E of a value.
"""

import itertools
import math
from collections import defaultdict
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor

from megatron_patches.zigzag import zigzag_indices

_LENGTH_STEP = 32
"""Number of tokens to whose multiple sequences are padded."""
_LONGEST_PADDED = 512
"""Longest sequence in tokens that is padded; a longer one costs less as a call of its own."""


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
        self.tp_group, self.cp_group = pg_collection.tp, pg_collection.cp
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        # Tokens before its own that a query sees; None for all.
        self.window: int | None = config.window_size[0] if windowed else None
        if config.softmax_type not in ("vanilla", "learnable"):
            raise ValueError(f"trainer.megatron.softmax_type: {config.softmax_type} needs a GPU and Transformer Engine")
        sinks_H = torch.zeros(config.num_attention_heads // self.tp_group.size(), dtype=config.params_dtype)
        self.softmax_offset = torch.nn.Parameter(sinks_H) if config.softmax_type == "learnable" else None

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
        if ranks == 1:
            return self._padded(query, key, value, bounds)
        lengths = [end - start for start, end in itertools.pairwise(bounds)]
        order = torch.cat([zigzag_indices(bounds, ranks, r) for r in range(ranks)]).argsort().to(query.device)
        gathered = (gather_from_sequence_parallel_region(x, group=self.cp_group) for x in (key, value))
        key, value = (x.index_select(0, order) for x in gathered)
        masks = [_causal_mask(length, ranks, rank, self.window, query.device) for length in lengths]
        # split() has one backward; each slice would allocate the whole gradient.
        queries = query.split([length // ranks for length in lengths])
        outputs = []
        for q, k, v, mask in zip(queries, key.split(lengths), value.split(lengths), masks, strict=True):
            q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
            outputs.append(self._attend(q, k, v, mask).squeeze(0).transpose(0, 1))
        return torch.cat(outputs).flatten(1)

    def _padded(self, query: Tensor, key: Tensor, value: Tensor, bounds: list[int]) -> Tensor:
        groups_BL, rows_T = padded_groups(bounds)
        tokens = torch.cat([tokens_BL.flatten() for tokens_BL in groups_BL]).to(query.device)
        sizes = [tokens_BL.numel() for tokens_BL in groups_BL]
        # One backward for all groups; selecting each one's tokens would allocate the whole gradient for each.
        selected = (x.index_select(0, tokens).split(sizes) for x in (query, key, value))
        outputs = []
        for tokens_BL, *parts in zip(groups_BL, *selected, strict=True):
            q, k, v = (x.unflatten(0, tokens_BL.shape).transpose(1, 2) for x in parts)
            # Padding comes after a sequence's tokens, where the causal order hides it.
            outputs.append(self._attend(q, k, v, None).transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs).index_select(0, rows_T.to(query.device)).flatten(1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """`mask`: bool [queries, keys] of the tokens that a query sees; None for those of the layer's causal order."""
        channels = v.shape[-1]
        if mask is None and (self.window is not None or self.softmax_offset is not None):
            mask = _causal_mask(q.shape[-2], 1, 0, self.window, q.device)
        if channels < k.shape[-1]:
            # PyTorch's fused kernel of a CPU takes equal head sizes alone; the others hold all scores and are slower.
            v = F.pad(v, (0, k.shape[-1] - channels))
        dtype = q.dtype
        if q.device.type == "cpu" and dtype == torch.bfloat16:
            # The backward pass of a CPU's kernel takes several times as long in bfloat16; this keeps twice the memory.
            q, k, v = q.float(), k.float(), v.float()
        if self.softmax_offset is not None:
            assert mask is not None
            q, k, v, mask = _with_sinks(q, k, v, mask, self.softmax_offset.to(q.dtype) / self.scale)
        attended = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return attended[..., :channels].to(dtype)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """The sinks, under the key and in the shards of Megatron's own attention."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


def _with_sinks(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks_H: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same attention with one more key, which every query sees; `sinks_H`: its scores before they are scaled."""
    sink_channel = sinks_H[:, None, None].expand(*q.shape[:-1], 1)
    k = F.pad(F.pad(k, (0, 1)), (0, 0, 0, 1))
    last_key = torch.zeros_like(k)
    last_key[..., -1, -1] = 1.0
    # Values have as many channels as keys.
    v = F.pad(v, (0, k.shape[-1] - v.shape[-1], 0, 1))
    return torch.cat([q, sink_channel], dim=-1), k + last_key, v, F.pad(mask, (0, 1), value=True)


def padded_groups(bounds: list[int]) -> tuple[list[Tensor], Tensor]:
    """Sequences of a micro-batch by padded length: the next multiple of 32, or their own length if they are long.

    Args:
        bounds: S + 1 boundaries of the sequences, T tokens in all.

    Returns:
        int64 [B, L] for each padded length L, the tokens of its B sequences, any token where there is padding; and
        int64 [T], the row of each token where the flattened groups follow one another.
    """
    start_S, lengths = torch.tensor(bounds[:-1]), [end - start for start, end in itertools.pairwise(bounds)]
    members = defaultdict(list)
    for index, length in enumerate(lengths):
        padded = -(-length // _LENGTH_STEP) * _LENGTH_STEP if length <= _LONGEST_PADDED else length
        members[padded].append(index)
    groups_BL, row_S, row = [], torch.empty_like(start_S), 0
    for length, indices in members.items():
        groups_BL.append((start_S[indices, None] + torch.arange(length)).clamp_(max=bounds[-1] - 1))
        row_S[indices] = row + length * torch.arange(len(indices))
        row += length * len(indices)
    return groups_BL, torch.arange(bounds[-1]) + (row_S - start_S).repeat_interleave(torch.tensor(lengths))


def _causal_mask(length: int, ranks: int, rank: int, window: int | None, device: torch.device) -> Tensor:
    """bool [length / ranks, length]: tokens of a sequence that each query of this rank sees; `window`: at most this
    many before its own."""
    query_Q1 = zigzag_indices([0, length], ranks, rank).to(device)[:, None]
    key_L = torch.arange(length, device=device)
    visible_QL = key_L <= query_Q1
    return visible_QL if window is None else visible_QL & (key_L >= query_Q1 - window)
