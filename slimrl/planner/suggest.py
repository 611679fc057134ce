"""Legal layouts of a number of GPUs, ranked by whether they fit and by the estimated time of a step.

1. Tensor and context sizes are powers of two, pipelines have a whole number of layers on all stages but the last,
   experts are whole. With each goes the recipe's recompute setting, and full recompute.
2. What breaks a rule of the settings is left out. Memory and time of the rest follow from the table of weights.
3. The best few are built on the meta device, as `slimrl plan` builds one, and planned again with what was counted.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slimrl.config.check import check_recipe
from slimrl.config.devices import shares_devices
from slimrl.config.model_rules import UNEVEN_PIPELINE_FIELDS
from slimrl.config.schema import ParallelConfig, Recipe
from slimrl.planner.engine import GIB
from slimrl.planner.facts import Facts, buckets_of, model_facts, with_engines
from slimrl.planner.hardware import Hardware
from slimrl.planner.layout_plan import LayoutPlan, plan_layout
from slimrl.planner.parameters import built_stages
from slimrl.planner.recipe import Planned

LARGEST_CONTEXT = 16
ALIKE = 1.05
"""Layouts whose steps take at most so many times the fastest one's are taken as equally fast."""
FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    settings: str
    """As they are written on the command line"""
    plan: LayoutPlan

    @property
    def memory_gib(self) -> float:
        return self.plan.most_bytes / GIB

    @property
    def reason(self) -> str:
        """What keeps it from fitting, or what its time goes into."""
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
    planned: Planned,
    hardware: Hardware,
    *,
    gpus: int | None,
    count: int,
    mean_tokens: int | None = None,
) -> tuple[list[Suggestion], int, int]:
    """The best layouts, how many legal ones there are, and of how many trainer ranks.

    Args:
        gpus: trainer ranks, None for as many as the recipe has; engines on GPUs of their own come on top, those that
            share the trainer's fill these.
        count: most suggestions.

    Raises:
        ValueError: there is no legal layout, or engines that share the ranks' GPUs do not fill so many.
    """
    gpus = planned.recipe.trainer.num_ranks if gpus is None else gpus
    if gpus < 1 or count < 1:
        raise ValueError(f"--gpus {gpus} --top {count}: must be at least 1")
    rollout = planned.recipe.rollout
    if not planned.sft and shares_devices(planned.recipe) and gpus % rollout.engine_tensor:
        raise ValueError(f"--gpus {gpus}: engines of {rollout.engine_tensor} GPUs do not fill those of the trainer")
    known = model_facts(planned)
    if not planned.sft:
        known = with_engines(known, planned.recipe, buckets_of(known, planned.recipe), hardware)
    found = [
        plan_layout(
            known,
            recipe,
            known.table.stages(recipe.trainer.parallel, layers),
            layers,
            hardware,
            sft=planned.sft,
            mean_tokens=mean_tokens,
        )
        for recipe, layers in legal_layouts(planned, known, gpus, hardware)
    ]
    if not found:
        raise ValueError(f"--gpus {gpus}: no legal layout; try a number with more divisors")
    best = ranked(found)[:count]
    built = [
        plan_layout(
            known,
            plan.recipe,
            built_stages(plan.recipe.trainer, known.model),
            plan.layers,
            hardware,
            sft=planned.sft,
            mean_tokens=mean_tokens,
        )
        for plan in best
    ]
    suggestions = [Suggestion(settings=_settings(plan.recipe, planned.recipe), plan=plan) for plan in ranked(built)]
    return suggestions, len(found), gpus


def ranked(plans: Sequence[LayoutPlan]) -> list[LayoutPlan]:
    """Those that fit by time, the others behind them by memory.

    Those within 5% of the fastest come first, the one with the fewest ranks for a copy of the model, the simplest,
    before all.
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
    planned: Planned, known: Facts, gpus: int, hardware: Hardware
) -> Iterator[tuple[Recipe, list[list[int]]]]:
    """Recipes with another layout, and the layers of their stages."""
    command = "sft" if planned.sft else "train"
    for parallel in _parallels(known, gpus, hardware.gpus_per_node):
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
    planned: Planned, parallel: ParallelConfig, layers: list[list[int]], gpus: int, recompute: dict[str, Any]
) -> Recipe:
    """The micro-batch of a context-parallel group stays as long as it is."""
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
    if shares_devices(recipe) and not planned.sft:
        rollout = replace(rollout, num_engines=gpus // rollout.engine_tensor)
    return replace(recipe, trainer=trainer, rollout=rollout)


def _recomputes(recipe: Recipe) -> list[dict[str, Any]]:
    if recipe.trainer.megatron.get("recompute_granularity") == "full":
        return [{}]
    return [{}, FULL_RECOMPUTE]


def divided_layers(layers: int, pipeline: int) -> list[list[int]] | None:
    """Equally many layers on every stage but the last, which may have fewer; None where it would have none."""
    each = -(-layers // pipeline)
    if each * (pipeline - 1) >= layers:
        return None
    return [list(range(stage * each, min(layers, (stage + 1) * each))) for stage in range(pipeline)]


def _settings(recipe: Recipe, original: Recipe) -> str:
    """The overrides that make the original recipe this one."""
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
    return [2**power for power in range(most.bit_length()) if 2**power <= most]


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
