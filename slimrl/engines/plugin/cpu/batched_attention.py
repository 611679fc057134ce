"""Batched attention for SGLang's torch_native backend, in place of its Python loops over sequences.

Decode goes through the dense copy of decode_cache.py. Prefill, and decode batches too uneven for that copy, are
grouped by size, gathered from the pages and answered by one call per group (`paged_attention`).
The hooks have the signatures of the methods of TorchNativeAttnBackend that they wrap; attention over an encoder
(cross attention) and decode batches of one or two go to the original. Layers with sinks (sinks.py) attend over the
pages alone.
With attention data parallelism a batch may end in padding: in decode rows of request 0, which is nobody's, in prefill
tokens of no request. Their output is 0.
"""

from collections import defaultdict
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from slimrl.engines.plugin.cpu.decode_cache import DecodeCache
from slimrl.engines.plugin.cpu.sinks import ATTRIBUTE as SINKS
from slimrl.engines.plugin.cpu.sinks import with_sink

_COPY_OVER_POOL = 2
"""Largest size of the dense copy, as a multiple of the pool of pages."""
_FEW = 2
"""Largest number of sequences that decode faster in the original loop."""
_MAX_SCORES = 1 << 24
"""Attention scores (times heads) that one call may hold at a time: 64 MiB in float32."""


def after_init(result: None, backend: Any, model_runner: Any) -> None:
    backend.slimrl_decode_cache = DecodeCache(_COPY_OVER_POOL * model_runner.max_total_num_tokens)
    # Tokens to which a row of padding attends; SGLang asks every backend of a CPU for it, and this one has no answer.
    backend.get_cpu_graph_seq_len_fill_value = lambda: 1


def after_init_forward_metadata(result: None, backend: Any, batch: Any) -> None:
    """Hook of the backend, once per forward pass: plan a decode step, or drop from the copy what a prefill is about to
    write."""
    cache: DecodeCache = backend.slimrl_decode_cache
    # None in a batch that was not padded.
    count = len(batch.seq_lens) if batch._original_batch_size is None else batch._original_batch_size
    if batch.forward_mode.is_decode() and count > _FEW:
        table = backend.req_to_token_pool.req_to_token
        cache.begin_step(table, batch.req_pool_indices[:count], batch.seq_lens[:count])
    else:
        cache.forget(batch.req_pool_indices.tolist())


def around_decode(
    original: Callable[..., Tensor],
    backend: Any,
    query: Tensor,
    output: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    encoder_lens: Tensor | None = None,
    *,
    scaling: float | None,
    sliding_window_size: int | None,
    **rest: Any,
) -> Tensor:
    sinks = getattr(backend, SINKS, None)
    if encoder_lens is not None or rest["is_cross_attn"] or (len(seq_lens) <= _FEW and sinks is None):
        kwargs = {**rest, "scaling": scaling, "sliding_window_size": sliding_window_size}
        cache_args = (k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens)
        return original(backend, query, output, *cache_args, **kwargs)
    cache: DecodeCache = backend.slimrl_decode_cache
    if cache.ready and k_cache.dtype == query.dtype and sinks is None:
        attended = cache.attend(query, k_cache, v_cache, scaling, sliding_window_size)
        output[: len(attended)] = attended
        if len(output) > len(attended):
            output[len(attended) :] = 0
        return output
    prefix_lens = (seq_lens - 1).tolist()
    return paged_attention(
        query, output, k_cache, v_cache, req_to_token, req_pool_indices, prefix_lens, [1] * len(prefix_lens),
        scale=scaling, window=sliding_window_size, sinks=sinks,
    )  # fmt: skip


def around_extend(
    original: Callable[..., Tensor],
    backend: Any,
    query: Tensor,
    output: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_prefix_lens: Tensor,
    extend_seq_lens: Tensor,
    encoder_lens: Tensor | None = None,
    *,
    scaling: float | None,
    causal: bool,
    sliding_window_size: int | None,
    **rest: Any,
) -> Tensor:
    if encoder_lens is not None or not causal:
        kwargs = {**rest, "scaling": scaling, "causal": causal, "sliding_window_size": sliding_window_size}
        lens = (seq_lens, extend_prefix_lens, extend_seq_lens, encoder_lens)
        return original(backend, query, output, k_cache, v_cache, req_to_token, req_pool_indices, *lens, **kwargs)
    new_lens = extend_seq_lens.tolist()
    output[sum(new_lens) :] = 0
    return paged_attention(
        query, output, k_cache, v_cache, req_to_token, req_pool_indices,
        extend_prefix_lens.tolist(), new_lens, scale=scaling, window=sliding_window_size,
        sinks=getattr(backend, SINKS, None),
    )  # fmt: skip


def paged_attention(
    query: Tensor,
    output: Tensor,
    keys_pool: Tensor,
    values_pool: Tensor,
    req_to_token: Tensor,
    requests: Tensor,
    prefix_lens: list[int],
    new_lens: list[int],
    *,
    scale: float | None,
    window: int | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of new tokens over cached prefixes and themselves.

    Args:
        query: [T, H, D], the new tokens of all requests one after the other.
        output: [T, H, Dv], written in place.
        keys_pool: [slots, G, D] with H a multiple of G.
        values_pool: [slots, G, Dv].
        req_to_token: [rows, tokens], slot in the pools of each token of a request.
        requests: the row of each request in that table.
        prefix_lens: cached tokens of each request.
        new_lens: new tokens of each request; their keys and values are in the pools already.
        scale: factor of the scores; None for 1 / sqrt(D).
        window: a query sees this many tokens before its own; None for all.
        sinks: [H], a further score of each head, of no value; None without.
    """
    starts = [0, *accumulate(new_lens)]
    groups = defaultdict(list)
    for index, (prefix, new) in enumerate(zip(prefix_lens, new_lens, strict=True)):
        # Equal bit lengths: padding at most doubles a request.
        groups[prefix == 0, new.bit_length(), (prefix + new).bit_length()].append(index)
    for members in groups.values():
        longest_new = max(new_lens[index] for index in members)
        longest = max(prefix_lens[index] + new_lens[index] for index in members)
        size = max(1, _MAX_SCORES // (query.shape[1] * longest_new * longest))
        for first in range(0, len(members), size):
            chosen = members[first : first + size]
            start_B, prefix_B, new_B = (
                torch.tensor([lens[i] for i in chosen]) for lens in (starts, prefix_lens, new_lens)
            )
            slots_BL = req_to_token[requests[chosen].long(), :longest]
            _attend_group(
                query, output, keys_pool, values_pool, slots_BL, start_B, prefix_B, new_B, scale, window, sinks
            )
    return output


def _attend_group(
    query: Tensor,
    output: Tensor,
    keys_pool: Tensor,
    values_pool: Tensor,
    slots_BL: Tensor,
    start_B: Tensor,
    prefix_B: Tensor,
    new_B: Tensor,
    scale: float | None,
    window: int | None,
    sinks: Tensor | None,
) -> None:
    """Attention of one padded group of requests. B requests, N their new tokens, L their whole length, M query heads
    per key head.

    Either all of them have a cached prefix or none has.
    """
    longest_new, longest = int(new_B.max()), int((prefix_B + new_B).max())
    heads, repeats = keys_pool.shape[1], query.shape[1] // keys_pool.shape[1]

    key_position_L = torch.arange(longest)
    exists_BL = key_position_L < (prefix_B + new_B)[:, None]
    slots_BL = slots_BL[:, :longest].long().masked_fill(~exists_BL, 0)
    keys_BGLD = keys_pool[slots_BL].to(query.dtype).transpose(1, 2)
    values_BGLD = values_pool[slots_BL].masked_fill_(~exists_BL[:, :, None, None], 0).to(query.dtype).transpose(1, 2)

    if window is None and sinks is None and not prefix_B.any():
        # The kernel's own causal order hides the padding.
        tokens_BL = (start_B[:, None] + key_position_L).masked_fill_(~exists_BL, 0)
        out_BHLD = scaled_dot_product_attention(
            query[tokens_BL].transpose(1, 2), keys_BGLD, values_BGLD,
            is_causal=True, scale=scale, enable_gqa=repeats > 1,
        )  # fmt: skip
        output[tokens_BL[exists_BL]] = out_BHLD.transpose(1, 2)[exists_BL]
        return

    # Queries in chunks, so that one long prompt does not hold all its scores at once.
    chunk = max(1, _MAX_SCORES // (len(new_B) * query.shape[1] * longest))
    for first in range(0, longest_new, chunk):
        new_N = torch.arange(first, min(first + chunk, longest_new))
        is_new_BN = new_N < new_B[:, None]
        tokens_BN = (start_B[:, None] + new_N).masked_fill_(~is_new_BN, 0)
        position_BN = (prefix_B[:, None] + new_N)[..., None]
        visible_BNL = key_position_L <= position_BN
        if window is not None:
            visible_BNL &= key_position_L >= position_BN - window
        visible_BNL |= ~is_new_BN[..., None]
        # Query heads of one key head go into the query axis: keys and values are read once, not repeated.
        query_BGMND = query[tokens_BN].unflatten(2, (heads, repeats)).permute(0, 2, 3, 1, 4)
        if sinks is None:
            mask = visible_BNL[:, None, None].expand(-1, 1, repeats, -1, -1).flatten(2, 3)
            keys, values = keys_BGLD, values_BGLD
        else:
            sinks_GMN1 = sinks.to(query.dtype).view(heads, repeats, 1, 1).expand(-1, -1, len(new_N), -1)
            keys, values, mask = with_sink(keys_BGLD, values_BGLD, visible_BNL, sinks_GMN1)
        out = scaled_dot_product_attention(query_BGMND.flatten(2, 3), keys, values, attn_mask=mask, scale=scale)
        out_BNHD = out.unflatten(2, (repeats, len(new_N))).permute(0, 3, 1, 2, 4).flatten(2, 3)
        output[tokens_BN[is_new_BN]] = out_BNHD[is_new_BN]
