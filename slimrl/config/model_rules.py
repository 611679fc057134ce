"""Rules between a recipe's parallel layout and the model that it trains, read from the model's config.json."""

import math
from collections.abc import Callable, Iterator
from typing import Any

from slimrl.config.divisors import fitting_text
from slimrl.config.load import trains
from slimrl.config.problems import Violation
from slimrl.config.schema import ParallelConfig, Recipe

UNEVEN_ENDS = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")

UNEVEN_PIPELINE_FIELDS = (
    *UNEVEN_ENDS,
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""Fields of `trainer.megatron` that lift the rule that layers divide evenly."""


def first_of(config: dict[str, Any], *names: str) -> int:
    """The first of these keys that the config has and that is not null, else 0."""
    return next((int(config[name]) for name in names if config.get(name) is not None), 0)


def num_experts(hf_config: dict[str, Any]) -> int:
    """Routed experts of a layer; 0 for a dense model."""
    return first_of(hf_config, "num_experts", "n_routed_experts", "num_local_experts")


def _must_divide(key: str, size: int, number: int, noun: str, fits: Callable[[int], bool]) -> Iterator[Violation]:
    """`fits`: whether a size keeps all rules of the key, those of the ranks that there are too."""
    if number and number % size:
        yield key, f"{size} does not divide the model's {number} {noun}." + fitting_text(size, fits, number)


def model_violations(recipe: Recipe, hf_config: dict[str, Any], command: str) -> Iterator[Violation]:
    """(key, what is wrong) of a layout that does not divide the model; sizes are at least 1 here."""
    if trains(command):
        yield from _tensor(recipe, hf_config)
        yield from _experts(recipe, hf_config)
        yield from _pipeline(recipe, hf_config)
    if command == "sft":
        yield from _positions(hf_config, "sft.max_tokens", recipe.sft.max_tokens)
    elif command != "export":
        yield from _engine(recipe, hf_config)
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


def _cut_by_tensor(hf_config: dict[str, Any]) -> list[tuple[int, str]]:
    """What tensor parallelism divides: how many and of what; 0 of what the model has not."""
    heads, experts = first_of(hf_config, "num_attention_heads"), num_experts(hf_config)
    cut = [(heads, "attention heads")]
    if not hf_config.get("kv_lora_rank"):
        # Megatron itself would cut within groups of heads; our weight maps lay out whole groups on a rank.
        groups = first_of(hf_config, "num_key_value_heads") or heads
        cut.append((groups, "key-value heads, which the trainer does not split"))
    dense = first_of(hf_config, "intermediate_size")
    if not experts:
        return [*cut, (dense, "intermediate columns")]
    shared = _expert_width(hf_config) * first_of(hf_config, "n_shared_experts")
    cut.append((shared, "columns of the shared experts"))
    if first_of(hf_config, "first_k_dense_replace"):
        cut.append((dense, "columns of a dense layer"))
    return cut


def _expert_width(hf_config: dict[str, Any]) -> int:
    return first_of(hf_config, "moe_intermediate_size", "intermediate_size")


def _tensor(recipe: Recipe, hf_config: dict[str, Any]) -> Iterator[Violation]:
    parallel, cut = recipe.trainer.parallel, _cut_by_tensor(hf_config)

    def fits(size: int) -> bool:
        ranks = size * parallel.pipeline * parallel.context
        return not (recipe.trainer.num_ranks % ranks or any(number % size for number, _ in cut))

    for number, noun in cut:
        yield from _must_divide("trainer.parallel.tensor", parallel.tensor, number, noun, fits)


def _experts(recipe: Recipe, hf_config: dict[str, Any]) -> Iterator[Violation]:
    parallel, experts, ranks = recipe.trainer.parallel, num_experts(hf_config), recipe.trainer.num_ranks
    if not experts:
        for name in ("expert", "expert_tensor"):
            if getattr(parallel, name) > 1:
                yield f"trainer.parallel.{name}", f"{getattr(parallel, name)}: the model has no experts. Use 1."
        return

    def parts_fit(size: int) -> bool:
        return not (experts % size or ranks % (size * parallel.expert_tensor * parallel.pipeline))

    def columns_fit(size: int) -> bool:
        return not (width % size or ranks % (size * parallel.expert * parallel.pipeline))

    width = _expert_width(hf_config)
    yield from _must_divide("trainer.parallel.expert", parallel.expert, experts, "experts", parts_fit)
    key, noun = "trainer.parallel.expert_tensor", "columns of an expert"
    yield from _must_divide(key, parallel.expert_tensor, width, noun, columns_fit)
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
    """The setting that gives the last stage what the others leave; empty if that is nothing."""
    last = layers - -(-layers // parallel.pipeline) * (parallel.pipeline - 1)
    return f"trainer.megatron.num_layers_in_last_pipeline_stage: {last}" if last > 0 else ""


def _chunks_text(layers: int, wrong: int) -> str:
    return fitting_text(wrong, lambda size: size > 1 and not layers % size, layers) or " Use null."


def _uneven_ends(recipe: Recipe, layers: int) -> Iterator[Violation]:
    """Stages of which the first or the last has a number of layers of its own; the others share the rest evenly."""
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


def _engine(recipe: Recipe, hf_config: dict[str, Any]) -> Iterator[Violation]:
    key, tensor, parts = "rollout.engine_tensor", recipe.rollout.engine_tensor, recipe.rollout.engine_expert
    heads, experts = first_of(hf_config, "num_attention_heads"), num_experts(hf_config)
    groups = 0 if hf_config.get("kv_lora_rank") else first_of(hf_config, "num_key_value_heads") or heads
    width = first_of(hf_config, "moe_intermediate_size")

    def fits(size: int) -> bool:
        if heads % size or (groups and groups % size and size % groups):
            return False
        return not experts or bool(experts % parts) or not (size % parts or width % (size // parts))

    yield from _must_divide(key, tensor, heads, "attention heads", fits)
    if groups and groups % tensor and tensor % groups:
        yield key, f"{tensor} neither divides the model's {groups} key-value heads nor is a multiple of them."
    if recipe.rollout.routed_experts and not experts:
        yield "rollout.routed_experts", "the model has no experts. Use false."
    if not experts and parts > 1:
        yield "rollout.engine_expert", f"{parts}: the model has no experts. Use 1."

    def parts_fit(size: int) -> bool:
        return not (experts % size or tensor % size)

    yield from _must_divide("rollout.engine_expert", parts, experts, "experts", parts_fit)
    if experts and not tensor % parts and width % (tensor // parts):
        use = fitting_text(tensor, fits, heads)
        yield key, f"{tensor // parts} does not divide the model's {width} columns of an expert.{use}"


def _positions(hf_config: dict[str, Any], key: str, tokens: Any) -> Iterator[Violation]:
    limit = first_of(hf_config, "max_position_embeddings")
    if limit and isinstance(tokens, int) and tokens > limit:
        yield key, f"{tokens} is longer than the model's {limit} positions."
