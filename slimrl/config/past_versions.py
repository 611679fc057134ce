"""Older versions of the policy as players (`agent.past_versions`): the recipe of their engines, and their rules."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from slimrl.config.problems import Violation
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.rollout import RolloutMode
from slimrl.config.schema.speculative import SpeculativeConfig

KEY = "agent.past_versions.every_steps"


def past_recipe(recipe: Recipe) -> Recipe:
    """The recipe whose `rollout` is the engines of older versions: those of the policy, on devices of their own.

    Nothing that they say is trained on, so they report no experts. In a deterministic run they keep no prefix cache,
    whose content would decide the shape of a prefill and so its last bits.
    """
    uncached = {"disable_radix_cache": True} if recipe.deterministic else {}
    rollout = replace(
        recipe.rollout,
        num_engines=recipe.agent.past_versions.num_engines,
        min_engines=0,
        max_engines=0,
        colocated=False,
        routed_experts=False,
        speculative=SpeculativeConfig(),
        sglang={**uncached, **recipe.rollout.sglang},
    )
    return replace(recipe, rollout=rollout)


def past_violations(recipe: Recipe, hf_config: dict[str, Any] | None) -> Iterator[Violation]:
    """
    Args:
        hf_config: the model's config.json, or None to leave out the rules that need it.
    """
    every_steps = recipe.agent.past_versions.every_steps
    if not every_steps:
        return
    if not recipe.agent.environment:
        yield KEY, f"{every_steps}: there is no agent.environment with roles that older versions could play. Use 0."
    if recipe.rollout.spans_steps:
        is_async = recipe.rollout.mode is not RolloutMode.sync
        setting = f"rollout.mode {recipe.rollout.mode.value}" if is_async else "rollout.oversample"
        yield (
            KEY,
            f"{every_steps}: with {setting} episodes go on while the next step draws another version, and would change "
            f"their opponent in the middle. Use {'rollout.mode sync' if is_async else 'rollout.oversample 1'}.",
        )
    if hf_config is not None and hf_config.get("quantization_config"):
        yield (
            KEY,
            f"{every_steps}: versions are written in the trainer's precision, which engines of a quantized model do "
            "not load. Use a model without quantization_config.",
        )
