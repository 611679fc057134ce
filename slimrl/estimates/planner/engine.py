"""Memory of an engine on each of its GPUs: weights, KV cache and states of linear attention.

SGLang's `mem_fraction_static` is the fraction of a GPU's free memory for weights and KV cache together; the rest is for
activations and CUDA graphs. If the recipe does not set it, SGLang's own rule applies (sglang 0.5.23,
srt/arg_groups/memory_hook.py), here without its terms for multimodal models, speculative decoding, DeepEP and custom
graph sizes.

With `rollout.engine_attention_dp` each group of ranks holds the whole of attention and of the embedding, and a cache of
its own: an engine's cache is the sum of those of its groups.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.data.model_weights import TensorPart
from slimrl.estimates.planner.shape import Shape

GIB = 1024**3
MIB = 1024**2

_PREFILL_TOKENS = ((35, 4096), (60, 4096), (160, 8192))
"""(GPU memory below so many GiB, SGLang's chunked prefill size); 2048 for smaller GPUs, 16384 for larger ones."""
_SMALL_GIB = 20
_LARGE_BATCH = 300
"""Decoding batch above which SGLang reserves more for attention data parallelism."""
ATTENTION_NAMES = (".self_attn.", ".linear_attn.", ".embed_tokens.")
"""Parts of the names of tensors of which each group of ranks holds the whole."""
_STATES_OVER_KV = 0.9
"""SGLang's default of `mamba_full_memory_ratio`: bytes for states of linear attention over bytes of the KV cache."""
_STATES_OF_A_SEQUENCE = 5
"""States that SGLang reserves for each running sequence so that prefixes can be cached
(mem_cache/kv_cache_configurator.py); without a prefix cache it is one."""


@dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """Bytes on one GPU of an engine, and what fits, unless stated otherwise."""

    weights: int
    expert_weights: int
    """Bytes of the routed experts among the weights"""
    kv_cache: int
    """Bytes of the KV cache, states of linear attention included"""
    mem_fraction_static: float
    kv_bytes_per_token: int
    """Bytes of keys and values per token on one GPU"""
    kv_tokens: int
    """Number of tokens that one engine's KV cache holds"""
    trajectories: int
    """Number of trajectories of maximum length that fit into all engines at once"""
    state_bytes: int = 0
    """Bytes of a sequence's states of linear attention"""
    sequences: int | None = None
    """Number of sequences that one engine's states of linear attention allow at once; None without linear attention"""


def plan_engine(
    recipe: Recipe,
    shape: Shape,
    parts: Iterable[TensorPart],
    replicated: Collection[str],
    *,
    gpu_bytes: int,
    reserve_bytes: int,
) -> EnginePlan:
    """
    Args:
        parts: all tensors of a resync, in the engines' format.
        replicated: names of tensors that each rank holds whole.
        reserve_bytes: GPU memory that is not free when the engine starts.
    """
    rollout = recipe.rollout
    fraction = rollout.sglang.get("mem_fraction_static") or static_fraction(recipe, shape, gpu_bytes)
    weights, experts = engine_weight_bytes(recipe, shape, parts, replicated)
    pool = max(0, round((gpu_bytes - reserve_bytes) * float(fraction)) - weights)
    ratio = float(rollout.sglang.get("mamba_full_memory_ratio") or _STATES_OVER_KV) if any(shape.linear) else 0.0
    states = round(pool * ratio / (1 + ratio))
    per_token = kv_bytes_per_token(shape, rollout.attention_tp, _kv_width(recipe))
    state = state_bytes(shape, rollout.attention_tp)
    reserved = 1 if rollout.sglang.get("disable_radix_cache") else _STATES_OF_A_SEQUENCE
    # Sequences and tokens of one group of ranks, to which a trajectory keeps.
    sequences = states // (state * reserved) if state else None
    tokens = (pool - states) // per_token
    limit = rollout.sglang.get("max_total_tokens")
    tokens = min(tokens, int(limit)) if limit else tokens
    longest, groups = tokens // rollout.max_trajectory_tokens, rollout.engine_attention_dp
    return EnginePlan(
        weights=weights,
        expert_weights=experts,
        kv_cache=tokens * per_token + states,
        mem_fraction_static=float(fraction),
        kv_bytes_per_token=per_token,
        kv_tokens=tokens * groups,
        trajectories=(longest if sequences is None else min(longest, sequences)) * groups * rollout.num_engines,
        state_bytes=state,
        sequences=None if sequences is None else sequences * groups,
    )


def kv_bytes_per_token(shape: Shape, ranks: int, element_bytes: float) -> int:
    """Bytes of keys and values of a token on one of the ranks that share a request's attention, over all layers that
    have them.

    Grouped-query attention keeps keys and values of a rank's heads, at least one (arXiv:2305.13245); multi-latent
    attention keeps the latent and the rotated key, whole on every rank (arXiv:2405.04434, section 2.1).
    """
    if shape.kv_latent:
        columns = shape.kv_latent + shape.rotary_columns
    else:
        columns = max(1, shape.kv_heads // ranks) * (shape.query_columns + shape.value_columns)
    return round(shape.attention_layers * columns * element_bytes)


def state_bytes(shape: Shape, ranks: int) -> int:
    """Bytes of a sequence's states on one rank: in each gated delta net a float32 matrix per value head, and in
    bfloat16 the channels of the tokens that the next step of the convolution needs."""
    keys, values = shape.linear_key_columns, shape.linear_value_columns
    channels = 2 * shape.linear_keys * keys + shape.linear_values * values
    elements = 4 * shape.linear_values * keys * values + 2 * (shape.linear_kernel - 1) * channels
    return sum(shape.linear) * elements // ranks


def engine_weight_bytes(
    recipe: Recipe, shape: Shape, parts: Iterable[TensorPart], replicated: Collection[str]
) -> tuple[int, int]:
    """Bytes of one rank's weights: its shards, copies of key-value heads included, with the replicated tensors; and
    those of the experts among them."""
    rollout, ranks = recipe.rollout, recipe.rollout.attention_tp
    copies = 1 if shape.kv_latent else max(1, ranks // shape.kv_heads)
    total = experts = 0.0
    for part in parts:
        name = part.spec.name
        if name in replicated:
            total += part.nbytes
        elif any(of in name for of in ATTENTION_NAMES):
            total += part.nbytes / ranks * (copies if ".k_proj." in name or ".v_proj." in name else 1)
        else:
            total += part.nbytes / rollout.engine_tp
            experts += part.nbytes / rollout.engine_tp * (".experts." in name)
    return round(total), round(experts)


def static_fraction(recipe: Recipe, shape: Shape, gpu_bytes: int) -> float:
    """SGLang's default of `mem_fraction_static`."""
    sglang, ranks = recipe.rollout.sglang, recipe.rollout.engine_tp
    gib = gpu_bytes / GIB
    small = 2048 if gib < _SMALL_GIB else 16384
    default = next((tokens for below, tokens in _PREFILL_TOKENS if _SMALL_GIB <= gib < below), small)
    prefill = int(sglang.get("chunked_prefill_size") or default)
    batch = _decoding_batch(sglang, gib, ranks)
    reserved = 512 + max(prefill, 2048) * 1.5 + ranks / 8 * 1024 + _graph_mib(recipe.rollout, shape, batch, prefill)
    if (groups := recipe.rollout.engine_attention_dp) > 1:
        reserved += groups * batch * (3 if batch <= _LARGE_BATCH else 4.5)
    if gib > 60:
        reserved = max(reserved, 10 * 1024)
    return round(max(0.0, (gpu_bytes / MIB - reserved) / (gpu_bytes / MIB)), 3)


def _decoding_batch(sglang: dict[str, Any], gib: float, ranks: int) -> int:
    """Sequences of the largest decoding graph."""
    few = ((20, 8), (35, 48), (60, 32), (160, 256))
    many = ((20, 8), (60, 160), (160, 512))
    batch = next((batch for below, batch in (few if ranks < 4 else many) if gib < below), 512)
    return min(batch, int(sglang.get("max_running_requests") or batch))


def _graph_mib(rollout: RolloutConfig, shape: Shape, batch: int, prefill: int) -> float:
    """Reserved for CUDA graphs: for decoding 2 MiB per sequence of the largest batch; for prefill 8 MiB per graph, or
    1.5 GiB with multi-latent attention."""
    decoding = 2 * batch if _has_graphs(rollout, "decode") else 0
    if not _has_graphs(rollout, "prefill"):
        return decoding
    largest = min(prefill, int(rollout.sglang.get("max_total_tokens") or prefill))
    return decoding + (1.5 * 1024 if shape.kv_latent else 8 * _prefill_graphs(largest))


def _has_graphs(rollout: RolloutConfig, phase: str) -> bool:
    """Whether SGLang captures graphs for `decode` or `prefill`: a backend goes before switches that turn graphs off.

    A colocated engine has none for prefill unless its recipe names a backend (engines/servers/server.py).
    """
    sglang = rollout.sglang
    if (backend := sglang.get(f"cuda_graph_backend_{phase}")) is not None:
        return bool(backend != "disabled")
    off = sglang.get("disable_cuda_graph") or sglang.get(f"disable_{phase}_cuda_graph")
    return not (off or (rollout.colocated and phase == "prefill"))


def _prefill_graphs(largest: int) -> int:
    """Number of graphs: one per token count up to `largest`, in growing steps."""
    steps = ((4, 4, 32), (48, 16, 256), (288, 32, 512), (576, 64, 1024), (1280, 256, 4096), (4608, 512, largest))
    return sum(len(range(first, min(last, largest) + 1, step)) for first, step, last in steps)


def _kv_width(recipe: Recipe) -> float:
    kind = str(recipe.rollout.sglang.get("kv_cache_dtype") or "auto")
    if kind == "auto":
        return recipe.trainer.precision.element_bytes
    return 1 if kind.startswith("fp8") else 2
