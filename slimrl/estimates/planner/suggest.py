"""Legal layouts of a number of GPUs, ranked by whether they fit and by the estimated time of a step.

1. Tensor and context sizes are powers of two, all pipeline stages but the last have equally many layers, expert sizes
   divide the experts. Each layout is tried with the recipe's recompute setting and with full recompute.
2. Layouts that break a rule are dropped. Memory and time of the rest follow from the weight map.
3. The best few are built on the meta device, as by `slimrl plan`, and planned again with the counted parameters.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from slimrl.config.check import check_recipe
from slimrl.config.model_rules import UNEVEN_PIPELINE_FIELDS
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.trainer import ParallelConfig
from slimrl.estimates.planner.engine import GIB
from slimrl.estimates.planner.facts import Facts, buckets_of, model_facts, with_engines
from slimrl.estimates.planner.hardware import Hardware
from slimrl.estimates.planner.layout_plan import LayoutPlan, plan_layout
from slimrl.estimates.planner.parameters import built_stages
from slimrl.models.offline_recipe import OfflineRecipe

LARGEST_CONTEXT = 16
ALIKE = 1.05
"""Layouts count as equally fast up to this multiple of the fastest step."""
FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    settings: str
    """Settings of the layout, as for the command line"""
    plan: LayoutPlan

    @property
    def memory_gib(self) -> float:
        return self.plan.most_bytes / GIB

    @property
    def reason(self) -> str:
        """Reason why it does not fit, or where its time goes."""
        if self.plan.problems:
            return self.plan.problems[0]
        sent = {
            name.removesuffix("_s"): seconds
            for name, seconds in vars(self.plan.communication).items()
            if seconds * self.plan.updates > 0.05 * self.plan.training_s
        }
        sending = ", ".join(f"{name} {seconds * self.plan.updates:.0f} s" for name, seconds in sent.items())
        return f"bubble {self.plan.work.bubble:.0%}" + (f"; sending: {sending}" if sending else "")


def suggest(
    planned: OfflineRecipe,
    hardware: Hardware,
    *,
    gpus: int | None,
    count: int,
    mean_tokens: int | None = None,
    seen: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[list[Suggestion], int, int]:
    """The best layouts, the number of legal ones, and the number of trainer ranks.

    Args:
        gpus: trainer ranks, None for the recipe's number. Engines on GPUs of their own come on top; those that share
            the trainer's GPUs fill them.
        count: maximum number of suggestions.
        seen: called with the numbers of layouts that have been looked at, legal or not, and of all.

    Raises:
        ValueError: there is no legal layout, or engines cannot fill the GPUs that they share with the trainer.
    """
    gpus = planned.recipe.trainer.num_ranks if gpus is None else gpus
    if gpus < 1 or count < 1:
        raise ValueError(f"--gpus {gpus} --top {count}: must be at least 1")
    rollout = planned.recipe.rollout
    if not planned.sft and planned.recipe.shares_devices and gpus % rollout.engine_tp:
        raise ValueError(f"--gpus {gpus}: engines of {rollout.engine_tp} GPUs do not fill those of the trainer")
    known = model_facts(planned)
    if not planned.sft:
        known = with_engines(known, planned.recipe, buckets_of(known, planned.recipe), hardware)
    plan_of = partial(plan_layout, known, hardware=hardware, sft=planned.sft, mean_tokens=mean_tokens)
    found = [
        plan_of(recipe, known.table.stages(recipe.trainer.parallel, layers), layers)
        for recipe, layers in legal_layouts(planned, known, gpus, hardware, seen)
    ]
    if not found:
        raise ValueError(f"--gpus {gpus}: no legal layout; try a number with more divisors")
    built = [
        plan_of(plan.recipe, built_stages(plan.recipe.trainer, known.model), plan.layers)
        for plan in ranked(found)[:count]
    ]
    suggestions = [Suggestion(settings=_settings(plan.recipe, planned.recipe), plan=plan) for plan in ranked(built)]
    return suggestions, len(found), gpus


def ranked(plans: Sequence[LayoutPlan]) -> list[LayoutPlan]:
    """Layouts that fit, by time, then the others, by memory.

    Layouts within 5% of the fastest come first, those with the fewest ranks per model replica, the simplest, in front.
    """
    fast = ALIKE * min((plan.step_s for plan in plans if plan.fits), default=0.0)

    def rank(plan: LayoutPlan) -> tuple[int, float, float]:
        if not plan.fits:
            return 2, plan.most_bytes, 0.0
        if plan.step_s > fast:
            return 1, plan.step_s, 0.0
        parallel = plan.recipe.trainer.parallel
        return 0, parallel.pipeline * max(parallel.tensor * parallel.context, parallel.expert), plan.step_s

    return sorted(plans, key=rank)


def legal_layouts(
    planned: OfflineRecipe,
    known: Facts,
    gpus: int,
    hardware: Hardware,
    seen: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[tuple[Recipe, list[list[int]]]]:
    """Recipes with other layouts, and the layers of their stages; `seen` as for `suggest`."""
    command = "sft" if planned.sft else "train"
    parallels = list(_parallels(known, gpus, hardware.gpus_per_node))
    for number, parallel in enumerate(parallels):
        seen(number, len(parallels))
        layers = divided_layers(known.shape.layers, parallel.pipeline)
        if layers is None:
            continue
        for recompute in _recomputes(planned.recipe):
            recipe = _with_layout(planned, parallel, layers, gpus, recompute)
            if not any(not problem.warning for problem in check_recipe(recipe, known.hf_config, command)):
                yield recipe, layers


def _parallels(known: Facts, gpus: int, gpus_per_node: int) -> Iterator[ParallelConfig]:
    experts = known.shape.experts
    for tensor in _powers_of_two(min(gpus, gpus_per_node)):
        for pipeline in _divisors(gpus // tensor if gpus % tensor == 0 else 0):
            for context in _powers_of_two(min(LARGEST_CONTEXT, gpus // (tensor * pipeline))):
                for expert in _divisors(experts) if experts else [1]:
                    if gpus % (tensor * pipeline * context) == 0 and gpus % (pipeline * expert) == 0:
                        yield ParallelConfig(
                            tensor=tensor, pipeline=pipeline, context=context, expert=expert, sequence=tensor > 1
                        )


def _with_layout(
    planned: OfflineRecipe, parallel: ParallelConfig, layers: list[list[int]], gpus: int, recompute: dict[str, Any]
) -> Recipe:
    """A recipe with another layout. The tokens of a context-parallel group's micro-batch stay as they are."""
    recipe = planned.recipe
    trainer, rollout = recipe.trainer, recipe.rollout
    budget = trainer.max_tokens_per_rank * trainer.parallel.context
    megatron = {name: value for name, value in trainer.megatron.items() if name not in UNEVEN_PIPELINE_FIELDS}
    if len(layers[-1]) != len(layers[0]):
        megatron["num_layers_in_last_pipeline_stage"] = len(layers[-1])
    trainer = replace(
        trainer,
        num_ranks=gpus,
        parallel=parallel,
        max_tokens_per_rank=-(-budget // parallel.context),
        megatron={**megatron, **recompute},
    )
    if recipe.shares_devices and not planned.sft:
        rollout = replace(rollout, num_engines=gpus // rollout.engine_tp)
    critic = recipe.critic if recipe.has_critic else replace(recipe.critic, trainer=trainer)
    return replace(recipe, trainer=trainer, rollout=rollout, critic=critic)


def _recomputes(recipe: Recipe) -> list[dict[str, Any]]:
    if recipe.trainer.megatron.get("recompute_granularity") == "full":
        return [{}]
    return [{}, FULL_RECOMPUTE]


def divided_layers(layers: int, pipeline: int) -> list[list[int]] | None:
    """Equally many layers on every stage but the last, which may have fewer; None if it would have none."""
    each = -(-layers // pipeline)
    if each * (pipeline - 1) >= layers:
        return None
    return [list(range(stage * each, min(layers, (stage + 1) * each))) for stage in range(pipeline)]


def _settings(recipe: Recipe, original: Recipe) -> str:
    """The overrides that turn the original recipe into this one."""
    before, after = original.trainer, recipe.trainer
    pairs: list[tuple[str, Any, Any]] = [("trainer.num_ranks", before.num_ranks, after.num_ranks)]
    pairs += [
        (f"trainer.parallel.{name}", getattr(before.parallel, name), value)
        for name, value in vars(after.parallel).items()
    ]
    pairs.append(("trainer.max_tokens_per_rank", before.max_tokens_per_rank, after.max_tokens_per_rank))
    pairs += [
        (f"trainer.megatron.{name}", before.megatron.get(name), after.megatron.get(name))
        for name in sorted({*before.megatron, *after.megatron})
    ]
    pairs.append(("rollout.num_engines", original.rollout.num_engines, recipe.rollout.num_engines))
    changed = [f"{key}={_yaml(value)}" for key, old, value in pairs if old != value]
    return " ".join(changed) or "as it is"


def _yaml(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _powers_of_two(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length())]


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
