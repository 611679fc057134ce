"""Rules between a recipe's parallel layout and the model that it trains, read from the model's config.json."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from slimrl.config.hf_config import (
    EXPERTS_WITH_BIASES,
    WITH_SINKS,
    expert_columns,
    first_of,
    num_dense_layers,
    num_experts,
    num_kv_heads,
    shared_columns,
)
from slimrl.config.load import trains
from slimrl.config.problems import Violation, fitting_text
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.trainer import ParallelConfig

UNEVEN_ENDS = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")

UNEVEN_PIPELINE_FIELDS = (
    *UNEVEN_ENDS,
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""Fields of `trainer.megatron` that allow pipeline stages of unequal size."""


def _must_divide(key: str, size: int, number: int, noun: str, fits: Callable[[int], bool]) -> Iterator[Violation]:
    """`fits`: whether a size keeps every rule of the key, those about the number of ranks included."""
    if number and number % size:
        yield key, f"{size} does not divide the model's {number} {noun}." + fitting_text(size, fits, number)


def model_violations(recipe: Recipe, hf_config: dict[str, Any], command: str) -> Iterator[Violation]:
    """(key, what is wrong) of a layout that does not divide the model; sizes are at least 1 here."""
    if trains(command):
        yield from _tensor(recipe, hf_config)
        yield from _sinks(recipe, hf_config)
        yield from _experts(recipe, hf_config)
        yield from _pipeline(recipe, hf_config)
    if command == "sft":
        yield from _positions(hf_config, "sft.max_tokens", recipe.sft.max_tokens)
    elif command != "export":
        yield from engine_violations(recipe, hf_config)
        # A context_length in the recipe says that the author knows better.
        if "context_length" not in recipe.rollout.sglang:
            yield from _positions(hf_config, "rollout.max_trajectory_tokens", recipe.rollout.max_trajectory_tokens)


def model_warnings(recipe: Recipe, hf_config: dict[str, Any], command: str) -> Iterator[Violation]:
    """(key, what is probably not meant) of a layout that this model makes wasteful."""
    parallel, experts = recipe.trainer.parallel, num_experts(hf_config)
    if trains(command) and experts and parallel.tensor > 1 and parallel.expert == parallel.expert_tensor == 1:
        yield (
            "trainer.parallel.expert",
            f"with expert 1 and expert_tensor 1 each of the tensor-parallel ranks holds all {experts} experts whole.",
        )


def _tensor(recipe: Recipe, hf_config: dict[str, Any]) -> Iterator[Violation]:
    parallel, experts = recipe.trainer.parallel, num_experts(hf_config)
    dense_columns = first_of(hf_config, "intermediate_size")
    # Megatron would split groups of query heads; slimrl's weight maps keep each group on one rank.
    sharded = [
        (first_of(hf_config, "num_attention_heads"), "attention heads"),
        (num_kv_heads(hf_config), "key-value heads, which the trainer does not split"),
    ]
    if experts:
        sharded.append((shared_columns(hf_config), "columns of the shared experts"))
    # Ranks of context parallelism share these too.
    shared = [(first_of(hf_config, "linear_num_key_heads"), "key heads of linear attention")]
    if parallel.context > 1 and "a2a" in _exchanges(recipe, hf_config):
        kind = "key-value heads" if num_kv_heads(hf_config) else "attention heads"
        heads = num_kv_heads(hf_config) or first_of(hf_config, "num_attention_heads")
        shared.append((heads, f"{kind}, which cp_comm_type a2a shares among these ranks"))
    mixed = num_dense_layers(hf_config) or hf_config.get("mlp_only_layers")
    if not experts or mixed or first_of(hf_config, "decoder_sparse_step") > 1:
        sharded.append((dense_columns, "columns of a dense layer" if experts else "intermediate columns"))

    def fits(size: int, context: int = parallel.context) -> bool:
        if recipe.trainer.num_ranks % (size * parallel.pipeline * context):
            return False
        return not any(number % size for number, _ in sharded) and not any(n % (size * context) for n, _ in shared)

    for number, noun in sharded:
        yield from _must_divide("trainer.parallel.tensor", parallel.tensor, number, noun, fits)
    for number, noun in shared:
        if number % (parallel.tensor * parallel.context):
            use = fitting_text(parallel.context, partial(fits, parallel.tensor), number)
            yield (
                "trainer.parallel.context" if parallel.context > 1 else "trainer.parallel.tensor",
                f"tensor {parallel.tensor} x context {parallel.context} = {parallel.tensor * parallel.context} does "
                f"not divide the model's {number} {noun}.{use}",
            )


def _exchanges(recipe: Recipe, hf_config: dict[str, Any]) -> list[str]:
    """How ranks of context parallelism exchange keys and values, in each layer or in all."""
    given = recipe.trainer.megatron.get("cp_comm_type")
    if isinstance(given, list):
        return [str(kind) for kind in given]
    return [str(given or ("a2a" if _has_sinks(hf_config) else "p2p"))]


def _sinks(recipe: Recipe, hf_config: dict[str, Any]) -> Iterator[Violation]:
    kinds = set(_exchanges(recipe, hf_config))
    if recipe.trainer.parallel.context > 1 and _has_sinks(hf_config) and kinds != {"a2a"}:
        yield (
            "trainer.megatron.cp_comm_type",
            f"{', '.join(sorted(kinds))}: Transformer Engine shares sinks of attention by a2a alone. Leave it out.",
        )


def _has_sinks(hf_config: dict[str, Any]) -> bool:
    return hf_config.get("model_type") in WITH_SINKS


def _experts(recipe: Recipe, hf_config: dict[str, Any]) -> Iterator[Violation]:
    parallel, experts, ranks = recipe.trainer.parallel, num_experts(hf_config), recipe.trainer.num_ranks
    if not experts:
        for name in ("expert", "expert_tensor"):
            if getattr(parallel, name) > 1:
                yield f"trainer.parallel.{name}", f"{getattr(parallel, name)}: the model has no experts. Use 1."
        return

    def ep_fits(size: int) -> bool:
        return not (experts % size or ranks % (size * parallel.expert_tensor * parallel.pipeline))

    def etp_fits(size: int) -> bool:
        return not (columns % size or ranks % (size * parallel.expert * parallel.pipeline))

    if hf_config.get("model_type") in EXPERTS_WITH_BIASES and parallel.expert_tensor > 1:
        yield (
            "trainer.parallel.expert_tensor",
            f"{parallel.expert_tensor}: the model's experts have biases, and megatron-core shards no such experts. "
            "Use 1, and trainer.parallel.expert.",
        )
        return
    columns = expert_columns(hf_config)
    yield from _must_divide("trainer.parallel.expert", parallel.expert, experts, "experts", ep_fits)
    key, noun = "trainer.parallel.expert_tensor", "columns of an expert"
    yield from _must_divide(key, parallel.expert_tensor, columns, noun, etp_fits)
    if parallel.tensor > 1 and not parallel.sequence:
        yield "trainer.parallel.sequence", "a Mixture-of-Experts model with tensor above 1 needs sequence: true."


def _pipeline(recipe: Recipe, hf_config: dict[str, Any]) -> Iterator[Violation]:
    parallel, layers = recipe.trainer.parallel, first_of(hf_config, "num_hidden_layers")
    given = {name for name in UNEVEN_PIPELINE_FIELDS if recipe.trainer.megatron.get(name)}
    if given - set(UNEVEN_ENDS):
        return
    if given:
        yield from _uneven_ends(recipe, layers)
    elif parallel.virtual_pipeline is None:
        if layers % parallel.pipeline:
            text = _pipeline_text(recipe, layers)
            yield "trainer.parallel.pipeline", f"{parallel.pipeline} does not divide the model's {layers} layers.{text}"
    elif layers % (chunks := parallel.pipeline * (parallel.virtual_pipeline or 1)):
        per_stage, uneven = divmod(layers, parallel.pipeline)
        instead = "" if uneven else _chunks_text(per_stage, parallel.virtual_pipeline)
        yield (
            "trainer.parallel.virtual_pipeline",
            f"pipeline {parallel.pipeline} x virtual_pipeline {parallel.virtual_pipeline} = {chunks} does not divide "
            f"the model's {layers} layers.{instead}",
        )


def _pipeline_text(recipe: Recipe, layers: int) -> str:
    parallel, ranks = recipe.trainer.parallel, recipe.trainer.num_ranks

    def fits(size: int) -> bool:
        dense, expert = parallel.tensor * parallel.context, parallel.expert * parallel.expert_tensor
        return not (layers % size or ranks % (size * dense) or ranks % (size * expert))

    use, last = fitting_text(parallel.pipeline, fits, layers), _last_stage(parallel, layers)
    if use and last:
        return f"{use.removesuffix('.')}, or set {last}."
    return use or (f" Set {last}." if last else "")


def _last_stage(parallel: ParallelConfig, layers: int) -> str:
    """The setting that gives the last stage the layers left over by the others; empty if none are left."""
    last = layers - -(-layers // parallel.pipeline) * (parallel.pipeline - 1)
    return f"trainer.megatron.num_layers_in_last_pipeline_stage: {last}" if last > 0 else ""


def _chunks_text(layers: int, wrong: int) -> str:
    return fitting_text(wrong, lambda size: size > 1 and not layers % size, layers) or " Use null."


def _uneven_ends(recipe: Recipe, layers: int) -> Iterator[Violation]:
    """The first or the last stage has its own number of layers; the others share the rest evenly."""
    parallel, megatron = recipe.trainer.parallel, recipe.trainer.megatron
    ends = {name: int(megatron[name]) for name in UNEVEN_ENDS if megatron.get(name)}
    key = f"trainer.megatron.{list(ends)[-1]}"
    if parallel.pipeline <= len(ends):
        yield key, f"needs trainer.parallel.pipeline above {len(ends)}."
        return
    rest, others = layers - sum(ends.values()), parallel.pipeline - len(ends)
    if rest < others or rest % others:
        last = _last_stage(parallel, layers) if len(ends) == 1 else ""
        yield (
            key,
            f"{' and '.join(str(size) for size in ends.values())} of the model's {layers} layers leave {rest}, which "
            f"do not divide over the other {others} stages." + (f" Set {last}." if last else ""),
        )
        return
    chunks = parallel.virtual_pipeline or 1
    if wrong := [size for size in (*ends.values(), rest // others) if size % chunks]:
        yield (
            "trainer.parallel.virtual_pipeline",
            f"{chunks} does not divide the {wrong[0]} layers of a stage."
            + _chunks_text(math.gcd(*ends.values(), rest // others), chunks),
        )


def engine_violations(recipe: Recipe, hf_config: dict[str, Any]) -> Iterator[Violation]:
    """Sizes of engines that do not divide the model."""
    key, tp, ep = "rollout.engine_tp", recipe.rollout.engine_tp, recipe.rollout.engine_ep
    heads, kv_heads = first_of(hf_config, "num_attention_heads"), num_kv_heads(hf_config)
    experts, columns = num_experts(hf_config), expert_columns(hf_config)
    linear_keys = first_of(hf_config, "linear_num_key_heads")
    groups = recipe.rollout.engine_attention_dp
    ranks = tp if tp % groups else tp // groups

    def tp_fits(size: int) -> bool:
        if size % groups:
            return False
        each = size // groups
        if heads % each or linear_keys % each or (kv_heads and kv_heads % each and each % kv_heads):
            return False
        return not experts or bool(experts % ep) or not (size % ep or columns % (size // ep))

    def ep_fits(size: int) -> bool:
        return not (experts % size or tp % size)

    text = f"{tp}" if ranks == tp else f"{tp} in {groups} groups of {ranks}"
    for number, noun in ((heads, "attention heads"), (linear_keys, "key heads of linear attention")):
        if number % ranks:
            use = fitting_text(tp, tp_fits, groups * number)
            yield key, f"{text} does not divide the model's {number} {noun}.{use}"
    if kv_heads and kv_heads % ranks and ranks % kv_heads:
        yield key, f"{text} neither divides the model's {kv_heads} key-value heads nor is a multiple of them."
    if not experts and groups > 1:
        yield (
            "rollout.engine_attention_dp",
            f"{groups}: the model has no experts to spread over the groups. Use 1, and more engines.",
        )
    if recipe.rollout.routed_experts and not experts:
        yield "rollout.routed_experts", "the model has no experts. Use false."
    if not experts and ep > 1:
        yield "rollout.engine_ep", f"{ep}: the model has no experts. Use 1."
    if hf_config.get("model_type") in EXPERTS_WITH_BIASES and ep > 1:
        yield "rollout.engine_ep", f"{ep}: SGLang loads the experts of this model into engines that have all. Use 1."
        return
    yield from _must_divide("rollout.engine_ep", ep, experts, "experts", ep_fits)
    if experts and not tp % ep and columns % (tp // ep):
        use = fitting_text(tp, tp_fits, heads)
        yield key, f"{tp // ep} does not divide the model's {columns} columns of an expert.{use}"


def _positions(hf_config: dict[str, Any], key: str, tokens: Any) -> Iterator[Violation]:
    limit = first_of(hf_config, "max_position_embeddings")
    if limit and isinstance(tokens, int) and tokens > limit:
        yield key, f"{tokens} is longer than the model's {limit} positions."
