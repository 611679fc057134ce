"""Rules between a recipe's parallel layout and the model that it trains, read from the model's config.json."""

from collections.abc import Iterator
from typing import Any

from slimrl.config.load import trains
from slimrl.config.schema import Recipe

UNEVEN_PIPELINE_FIELDS = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""Fields of `trainer.megatron` that lift the rule that layers divide evenly."""


def _first(config: dict[str, Any], *names: str) -> int:
    """The first of these keys that the config has and that is not null, else 0."""
    return next((int(config[name]) for name in names if config.get(name) is not None), 0)


def num_experts(hf_config: dict[str, Any]) -> int:
    """Routed experts of a layer; 0 for a dense model."""
    return _first(hf_config, "num_experts", "n_routed_experts", "num_local_experts")


def divisors_text(number: int, wrong: int) -> str:
    """` Use A or B.`: the divisors of `number` on either side of `wrong`."""
    divisors = [size for size in range(1, number + 1) if number % size == 0]
    nearest = [max(size for size in divisors if size < wrong), *[size for size in divisors if size > wrong][:1]]
    return f" Use {' or '.join(map(str, nearest))}."


def _must_divide(key: str, size: int, number: int, noun: str) -> Iterator[tuple[str, str]]:
    if number and number % size:
        yield key, f"{size} does not divide the model's {number} {noun}." + divisors_text(number, size)


def model_violations(recipe: Recipe, hf_config: dict[str, Any], command: str) -> Iterator[tuple[str, str]]:
    """(key, what is wrong) of a layout that does not divide the model; sizes are at least 1 here."""
    if trains(command):
        yield from _attention(recipe, hf_config)
        yield from _experts(recipe, hf_config)
        yield from _pipeline(recipe, hf_config)
    if command not in ("sft", "export"):
        yield from _engine(recipe, hf_config)


def _attention(recipe: Recipe, hf_config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    key, tensor = "trainer.parallel.tensor", recipe.trainer.parallel.tensor
    heads = _first(hf_config, "num_attention_heads")
    yield from _must_divide(key, tensor, heads, "attention heads")
    if not hf_config.get("kv_lora_rank"):
        groups = _first(hf_config, "num_key_value_heads") or heads
        yield from _must_divide(key, tensor, groups, "key-value heads")


def _experts(recipe: Recipe, hf_config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    parallel, experts = recipe.trainer.parallel, num_experts(hf_config)
    if not experts:
        for name in ("expert", "expert_tensor"):
            if getattr(parallel, name) > 1:
                yield f"trainer.parallel.{name}", f"{getattr(parallel, name)}: the model has no experts. Use 1."
        yield from _must_divide(
            "trainer.parallel.tensor", parallel.tensor, _first(hf_config, "intermediate_size"), "intermediate columns"
        )
        return
    yield from _must_divide("trainer.parallel.expert", parallel.expert, experts, "experts")
    width = _first(hf_config, "moe_intermediate_size", "intermediate_size")
    yield from _must_divide("trainer.parallel.expert_tensor", parallel.expert_tensor, width, "columns of an expert")
    shared = width * _first(hf_config, "n_shared_experts")
    yield from _must_divide("trainer.parallel.tensor", parallel.tensor, shared, "columns of the shared experts")
    if _first(hf_config, "first_k_dense_replace"):
        dense = _first(hf_config, "intermediate_size")
        yield from _must_divide("trainer.parallel.tensor", parallel.tensor, dense, "columns of a dense layer")
    if parallel.tensor > 1 and not parallel.sequence:
        yield "trainer.parallel.sequence", "a Mixture-of-Experts model with tensor above 1 needs sequence: true."


def _pipeline(recipe: Recipe, hf_config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    parallel, layers = recipe.trainer.parallel, _first(hf_config, "num_hidden_layers")
    chunks = parallel.pipeline * (parallel.virtual_pipeline or 1)
    if any(recipe.trainer.megatron.get(name) for name in UNEVEN_PIPELINE_FIELDS) or not layers % chunks:
        return
    if parallel.virtual_pipeline is None:
        yield from _must_divide("trainer.parallel.pipeline", parallel.pipeline, layers, "layers")
    else:
        yield (
            "trainer.parallel.virtual_pipeline",
            f"pipeline {parallel.pipeline} x virtual_pipeline {parallel.virtual_pipeline} = {chunks} does not divide "
            f"the model's {layers} layers.",
        )


def _engine(recipe: Recipe, hf_config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    key, tensor = "rollout.engine_tensor", recipe.rollout.engine_tensor
    heads = _first(hf_config, "num_attention_heads")
    yield from _must_divide(key, tensor, heads, "attention heads")
    groups = _first(hf_config, "num_key_value_heads") or heads
    if groups and not hf_config.get("kv_lora_rank") and groups % tensor and tensor % groups:
        yield key, f"{tensor} neither divides the model's {groups} key-value heads nor is a multiple of them."
    if recipe.rollout.routed_experts and not num_experts(hf_config):
        yield "rollout.routed_experts", "the model has no experts. Use false."
    experts, parts = num_experts(hf_config), recipe.rollout.engine_expert
    if not experts and parts > 1:
        yield "rollout.engine_expert", f"{parts}: the model has no experts. Use 1."
    yield from _must_divide("rollout.engine_expert", parts, experts, "experts")
    if experts and not tensor % parts:
        width = _first(hf_config, "moe_intermediate_size")
        yield from _must_divide(key, tensor // parts, width, "columns of an expert")
