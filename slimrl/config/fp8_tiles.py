"""Rules of engines and trainers that compute in block FP8: a rank should hold whole tiles of each matrix.

A trainer rounds with other tiles where it does not, so that is only a warning. Engines refuse it:
SGLang checks this when it builds a layer (layers/quantization/fp8.py). Fused matrices, queries with keys and values and
gate with up, are checked on any number of ranks; the others only where at least two ranks share them.
The rules hold on every machine, also where engines cannot compute in FP8 and get plain weights, so that a laptop and
its cluster judge a recipe alike.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import lcm
from typing import Any

from slimrl.config.hf_config import (
    expert_columns,
    first_of,
    num_dense_layers,
    num_experts,
    num_kv_heads,
    shared_columns,
)
from slimrl.config.problems import Violation
from slimrl.config.schema.precision import Fp8Scaling
from slimrl.config.schema.recipe import Recipe

EXPERTS = "columns of an expert"

TRAINER_TILE = 128
"""Rows and columns of a weight's tile in Transformer Engine."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A dimension of a layer's matrix that the ranks of an engine share."""

    noun: str
    module: str
    """Name of the layer's module behind `layers.N.`"""
    layers: range
    """Indices of the layers that have the module"""
    size: int
    ranks: int
    replicas: int = 1
    """Ranks that hold the same part"""
    fused: bool = True
    other_module: str = ""
    """The module's name in other families, if it has another there"""

    @property
    def per_rank(self) -> int:
        """Size of the dimension on one rank; 0 where it does not divide, which another rule refuses."""
        size, rest = divmod(self.size * self.replicas, self.ranks)
        return 0 if rest else size


def fp8_tile_violations(recipe: Recipe, hf_config: dict[str, Any]) -> Iterator[Violation]:
    """Sizes of engines whose ranks would get parts of tiles; nothing for a model in another precision."""
    tp, ep, dp = recipe.rollout.engine_tp, recipe.rollout.engine_ep, recipe.rollout.engine_attention_dp
    if tp % ep or tp % dp:
        return
    for shard in _split_tiles(hf_config, tp, ep, dp):
        key, wrong, others = "rollout.engine_tp", tp, _smaller_tp(hf_config, tp, ep, dp)
        if shard.noun == EXPERTS and (more := _larger_ep(hf_config, tp, ep, dp)):
            key, wrong, others = "rollout.engine_ep", ep, more
        ranks = f"{shard.ranks} rank{'s' * (shard.ranks > 1)}"
        instead = f" Use {' or '.join(map(str, others))}." if others else ""
        yield (
            key,
            f"{wrong}: the {shard.size} {shard.noun} on {ranks} are {shard.per_rank} each, no whole number of FP8 "
            f"tiles of {_tile(hf_config, shard)}.{instead}",
        )


def trainer_tile_warnings(recipe: Recipe, hf_config: dict[str, Any]) -> Iterator[Violation]:
    """Layouts of a trainer in block FP8 whose ranks hold parts of tiles, so that other layouts round differently."""
    if recipe.trainer.fp8 is not Fp8Scaling.blockwise:
        return
    tensor, expert = recipe.trainer.parallel.tensor, recipe.trainer.parallel.expert_tensor
    for shard in _shards(hf_config, attention_ranks=tensor, ranks=tensor, expert_ranks=expert):
        if shard.layers and shard.ranks > 1 and shard.per_rank % TRAINER_TILE:
            yield (
                f"trainer.parallel.{'expert_tensor' if shard.noun == EXPERTS else 'tensor'}",
                f"{shard.ranks}: the {shard.size} {shard.noun} are {shard.per_rank} on a rank, no whole number of FP8 "
                f"tiles of {TRAINER_TILE}. Other layouts round differently.",
            )


def _tile(hf_config: dict[str, Any], shard: Shard) -> int:
    rows, columns = hf_config["quantization_config"]["weight_block_size"]
    return lcm(rows, columns) if shard.ranks > 1 else rows


def _split_tiles(hf_config: dict[str, Any], tp: int, ep: int, dp: int) -> list[Shard]:
    """Dimensions that an engine of these sizes would split within tiles.

    Args:
        dp: groups of ranks, each of which has the whole of attention.
    """
    quantization = hf_config.get("quantization_config") or {}
    block = quantization.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block):
        return []
    names = quantization.get("modules_to_not_convert") or quantization.get("ignored_layers") or ()
    plain = [name.removeprefix("model.").strip(".") for name in names]
    return [
        shard
        for shard in _shards(hf_config, attention_ranks=tp // dp, ranks=tp, expert_ranks=tp // ep)
        if (shard.fused or shard.ranks > 1) and shard.per_rank % _tile(hf_config, shard) and _is_fp8(shard, plain)
    ]


def _is_fp8(shard: Shard, plain: list[str]) -> bool:
    """Whether any of the layers has this module in FP8; a name in `plain` matches whole parts of a module's path."""
    modules = [name for name in (shard.module, shard.other_module) if name]
    return any(
        not any(f".{name}." in f".layers.{layer}.{module}." for name in plain for module in modules)
        for layer in shard.layers
    )


def _shards(hf_config: dict[str, Any], *, attention_ranks: int, ranks: int, expert_ranks: int) -> Iterator[Shard]:
    """The dimensions that are sharded when attention, a dense layer or shared expert, and an expert are shared by so
    many ranks."""
    layers, experts = first_of(hf_config, "num_hidden_layers"), num_experts(hf_config)
    yield from _attention(hf_config, range(layers), attention_ranks)
    num_dense = num_dense_layers(hf_config) if experts else layers
    dense, columns = range(num_dense), first_of(hf_config, "intermediate_size")
    yield Shard(noun="columns of a dense layer", module="mlp.gate_proj", layers=dense, size=columns, ranks=ranks)
    if not experts:
        return
    sparse, columns = range(num_dense, layers), expert_columns(hf_config)
    yield Shard(noun=EXPERTS, module="mlp.experts", layers=sparse, size=columns, ranks=expert_ranks)
    noun, shared = "columns of the shared experts", shared_columns(hf_config)
    name = "shared_expert" if hf_config.get("shared_expert_intermediate_size") else "shared_experts"
    yield Shard(noun=noun, module=f"mlp.{name}.gate_proj", layers=sparse, size=shared, ranks=ranks)


def _attention(hf_config: dict[str, Any], layers: range, tp: int) -> Iterator[Shard]:
    heads, kv_heads = first_of(hf_config, "num_attention_heads"), num_kv_heads(hf_config)
    shard = partial(Shard, layers=layers, ranks=tp, fused=bool(kv_heads))
    if not kv_heads:
        nope, rotary, value = (first_of(hf_config, f"{name}_head_dim") for name in ("qk_nope", "qk_rope", "v"))
        queries = "self_attn.q_b_proj" if hf_config.get("q_lora_rank") else "self_attn.q_proj"
        yield shard(noun="rows of the queries", module=queries, size=heads * (nope + rotary))
        yield shard(noun="rows of keys and values", module="self_attn.kv_b_proj", size=heads * (nope + value))
        yield shard(noun="columns of attention's output", module="self_attn.o_proj", size=heads * value)
        return
    dim = first_of(hf_config, "head_dim") or first_of(hf_config, "hidden_size") // max(heads, 1)
    yield shard(noun="rows of the queries", module="self_attn.q_proj", size=heads * dim)
    yield shard(
        noun="rows of the keys",
        module="self_attn.k_proj",
        size=kv_heads * dim,
        replicas=max(1, tp // kv_heads),
    )
    for kind in ("key", "value"):
        size = first_of(hf_config, f"linear_num_{kind}_heads") * first_of(hf_config, f"linear_{kind}_head_dim")
        yield shard(
            noun=f"rows of linear attention's {kind}s",
            module="linear_attn.in_proj_qkvz",
            other_module="linear_attn.in_proj_qkv",
            size=size,
        )


def _smaller_tp(hf_config: dict[str, Any], tp: int, ep: int, dp: int) -> list[int]:
    """The largest smaller engine of whole heads and tiles, if there is one."""
    heads = first_of(hf_config, "num_attention_heads")
    kv_heads = num_kv_heads(hf_config) or heads
    each = ((n, n // dp) for n in range(tp - 1, 0, -1) if not (n % ep or n % dp))
    smaller = (n for n, size in each if not (heads % size or (kv_heads % size and size % kv_heads)))
    return [n for n in smaller if not _split_tiles(hf_config, n, ep, dp)][:1]


def _larger_ep(hf_config: dict[str, Any], tp: int, ep: int, dp: int) -> list[int]:
    """The next two larger expert-parallel sizes with whole experts and tiles, if there are any."""
    experts = num_experts(hf_config)
    larger = (n for n in range(ep + 1, tp + 1) if not (tp % n or experts % n))
    return [n for n in larger if all(shard.noun != EXPERTS for shard in _split_tiles(hf_config, tp, n, dp))][:2]
