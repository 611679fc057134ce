"""Decode attention over a dense copy of the running requests' keys and values.

SGLang keeps keys and values in pages scattered over one pool. On a CPU gathering them at every step costs more
than attention itself. Between two decode steps a request's context grows by one token and nothing else changes,
so a dense copy is kept, one row per running request, and each step writes one column of it:
1. `begin_step` plans the rows (row_table.py): which stay, move, or have to be filled from the pool;
2. `attend`, once per layer, brings that layer's copy up to date and answers all requests by one call.

Values narrower than keys (multi-latent attention) are padded with zeros, since attention is one fused kernel for equal
sizes alone, and several times slower otherwise.

Names: R rows, G key-value heads, M query heads of one of them, D head size, L tokens.
A row's tail beyond its length is zero, so that no stale NaN can reach another request through a masked product.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from slimrl.engines.plugin.cpu.row_table import RowTable

_LENGTH_STEP = 64
"""Number of tokens by which the copy's length grows."""
_ROW_STEP = 16
"""Number of requests by which the copy's number of rows grows."""


@dataclass(eq=False)
class _LayerCopy:
    keys_RGLD: Tensor
    values_RGLD: Tensor
    """Values of the tokens, zero beyond a value's size."""


@dataclass(eq=False)
class _Step:
    """What the layers of one decode step share."""

    rows: Tensor
    all_rows: Tensor
    """Indices of all rows: 0, 1, 2, ..."""
    order: Tensor
    """Inverse of `rows`: the batch position that each row answers."""
    last_R: Tensor
    """Position of the newest token of each request, in row order."""
    newest_slots_R: Tensor
    moves: Tensor | None
    """Indices [2, moves] of the rows from which and to which contents move; None if none do."""
    fresh_rows: Tensor
    fresh_slots_FL: Tensor
    fresh_mask_FL: Tensor
    length: int
    windows: dict[int | None, Tensor]
    """Additive mask [R, 1, L] of each sliding window, by its size."""


class DecodeCache:
    def __init__(self, max_tokens: int) -> None:
        """max_tokens: size of the dense copy in tokens, rows times length; a larger batch is not taken."""
        self._max_tokens = max_tokens
        self._table = RowTable()
        self._layers: dict[int, _LayerCopy] = {}
        self._capacity = (0, 0)
        self._step: _Step | None = None

    @property
    def ready(self) -> bool:
        """Whether `begin_step` took the batch."""
        return self._step is not None

    def forget(self, requests: list[int]) -> None:
        """Drop the copies of requests whose pages were written by a prefill."""
        self._table.forget(requests)
        self._step = None

    def begin_step(self, req_to_token: Tensor, requests: Tensor, lengths: Tensor) -> None:
        """Plan one decode step.

        Args:
            req_to_token: [requests, tokens], slot in the pool of every token of a request.
            requests: [R], the rows of that table that decode.
            lengths: [R], their tokens, the newest included.
        """
        longest = int(lengths.max())
        self._step = None
        if not self._reserve(len(requests), longest):
            return
        plan = self._table.plan(requests.tolist(), lengths.tolist())
        rows = torch.tensor(plan.rows)
        order = torch.empty_like(rows)
        all_rows = torch.arange(len(rows))
        order[rows] = all_rows
        last = (lengths.long() - 1)[order]
        fresh = torch.tensor(plan.fresh, dtype=torch.long)
        fresh_lengths = lengths[fresh]
        fresh_longest = int(fresh_lengths.max()) if len(fresh) else 0
        self._step = _Step(
            rows=rows,
            all_rows=all_rows,
            order=order,
            last_R=last,
            newest_slots_R=req_to_token[requests[order].long(), last].long(),
            moves=torch.tensor(plan.moves).T if plan.moves else None,
            fresh_rows=rows[fresh],
            fresh_slots_FL=req_to_token[requests[fresh].long(), :fresh_longest].long(),
            fresh_mask_FL=torch.arange(fresh_longest) < fresh_lengths[:, None],
            length=longest,
            windows={},
        )

    def _reserve(self, rows: int, length: int) -> bool:
        """Settle the size of the copies; starts afresh where growing the old ones would exceed the limit."""
        rows, length = _round_up(rows, _ROW_STEP), _round_up(length, _LENGTH_STEP)
        grown = (max(rows, self._capacity[0]), max(length, self._capacity[1]))
        if grown[0] * grown[1] > self._max_tokens:
            self._table.clear()
            self._layers.clear()
            grown = (rows, length)
        fits = rows * length <= self._max_tokens
        self._capacity = grown if fits else (0, 0)
        return fits

    def attend(
        self, query: Tensor, keys_pool: Tensor, values_pool: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        """Attention of one layer's newest queries, whose keys and values are in the pool already.

        Args:
            query: [R, G * M, D] in the order of the batch.
            keys_pool: [slots, G, D].
            values_pool: [slots, G, Dv], Dv <= D.
            scale: factor of the scores; None for 1 / sqrt(D).
            window: a query sees this many tokens before its own; None for all.

        Returns:
            [R, G * M, Dv], in the order of the batch.
        """
        assert self._step is not None
        step, count = self._step, len(self._step.rows)
        copy = self._updated(keys_pool, values_pool)
        heads = keys_pool.shape[1]
        query_RGMD = query[step.order].view(count, heads, -1, query.shape[-1])
        keys, values = (cached[:count, :, : step.length] for cached in (copy.keys_RGLD, copy.values_RGLD))
        mask = self._mask(window)[:, None].to(query.dtype)
        out_RGMD = scaled_dot_product_attention(query_RGMD, keys, values, attn_mask=mask, scale=scale)
        return out_RGMD[..., : values_pool.shape[-1]].flatten(1, 2)[step.rows]

    def _mask(self, window: int | None) -> Tensor:
        assert self._step is not None
        step = self._step
        if window not in step.windows:
            position_L = torch.arange(step.length)
            hidden = position_L > step.last_R[:, None]
            if window is not None:
                hidden |= position_L < step.last_R[:, None] - window
            step.windows[window] = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)[:, None]
        return step.windows[window]

    def _updated(self, keys_pool: Tensor, values_pool: Tensor) -> _LayerCopy:
        """Bring the layer's copy up to date: moved rows, filled rows, the newest token of each."""
        assert self._step is not None
        step = self._step
        copy = self._sized(keys_pool, values_pool)
        for cached, pool in ((copy.keys_RGLD, keys_pool), (copy.values_RGLD, values_pool)):
            if step.moves is not None:
                source, target = step.moves
                cached[target] = cached[source]
            if len(step.fresh_rows):
                fresh_FLGD = pool[step.fresh_slots_FL].masked_fill_(~step.fresh_mask_FL[:, :, None, None], 0.0)
                cached[step.fresh_rows] = 0.0
                cached[step.fresh_rows, :, : fresh_FLGD.shape[1], : pool.shape[-1]] = fresh_FLGD.transpose(1, 2)
            cached[step.all_rows, :, step.last_R, : pool.shape[-1]] = pool[step.newest_slots_R]
        return copy

    def _sized(self, keys_pool: Tensor, values_pool: Tensor) -> _LayerCopy:
        """The layer's copy, grown to the capacity that `begin_step` settled."""
        old = self._layers.get(keys_pool.data_ptr())
        if old is not None and old.values_RGLD.shape[::2] == self._capacity:
            return old
        rows, length = self._capacity
        _, heads, key_size = keys_pool.shape
        new = _LayerCopy(
            keys_RGLD=keys_pool.new_zeros(rows, heads, length, key_size),
            values_RGLD=values_pool.new_zeros(rows, heads, length, key_size),
        )
        if old is not None:
            old_rows, old_length = old.values_RGLD.shape[::2]
            new.keys_RGLD[:old_rows, :, :old_length] = old.keys_RGLD
            new.values_RGLD[:old_rows, :, :old_length] = old.values_RGLD
        self._layers[keys_pool.data_ptr()] = new
        return new


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step
