"""How fast the trainer and the engines are: from a recipe's plan."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from slimrl.config.load import intended_command
from slimrl.estimates.planner.generation import decoding_step_bytes
from slimrl.estimates.planner.hardware import GB, TERA, Hardware
from slimrl.estimates.planner.plan import Plan, make_plan
from slimrl.estimates.planner.work import forward_flops_per_token
from slimrl.models.offline_recipe import OfflineRecipe, read_offline


@dataclass(frozen=True, kw_only=True)
class Cluster:
    trainer_ranks: int
    engine_gpus: int
    """Number of GPUs of all engines; 0 if they share those of the trainer"""
    num_engines: int
    slots: int
    """Number of trajectories that may run at a time"""
    decoding: int
    """Number of sequences that may decode at a time, in all engines"""
    step_s: Callable[[int], float]
    """Function that gives the seconds of a decoding step from the number of sequences that decode"""
    train_s: float
    """Seconds of the passes for log-probs and the updates of a step"""
    resync_s: float

    @property
    def gpus(self) -> int:
        return self.trainer_ranks + self.engine_gpus


def read_train_recipe(path: Path, overrides: Sequence[str], *, model_needed: bool = True) -> OfflineRecipe:
    """Raises ValueError for a refused recipe, and for one of `slimrl sft`."""
    if intended_command(path, overrides) == "sft":
        raise ValueError(f"{path}: a recipe for slimrl sft, which has no rollout to simulate.")
    return read_offline(path, overrides, "train", model_needed=model_needed)


def planned_cluster(
    planned: OfflineRecipe, hardware: Hardware, *, lengths: tuple[float, float], decode_efficiency: float
) -> tuple[Cluster, list[str]]:
    """The cluster, and why it would not fit.

    Args:
        lengths: mean tokens of a trajectory, and mean context of a token when it is sampled.
        decode_efficiency: fraction of the memory bandwidth and of the peak that decoding reaches.
    """
    mean_tokens, context = lengths
    plan = make_plan(planned, hardware, mean_tokens=round(mean_tokens))
    assert plan.facts.engine is not None
    assert plan.resync is not None
    recipe, engine = planned.recipe, plan.facts.engine
    rollout = recipe.rollout
    states = () if engine.sequences is None else (engine.sequences,)
    of_an_engine = int(max(1, min(engine.kv_tokens / mean_tokens, *states, rollout.max_concurrency_per_engine)))
    cluster = Cluster(
        trainer_ranks=recipe.trainer.num_ranks,
        engine_gpus=0 if recipe.shares_devices else rollout.num_engines * rollout.engine_tp,
        num_engines=rollout.num_engines,
        slots=rollout.num_engines * rollout.max_concurrency_per_engine,
        decoding=rollout.num_engines * of_an_engine,
        step_s=_step_seconds(plan, context, decode_efficiency),
        train_s=plan.layout.training_s,
        resync_s=plan.resync.seconds,
    )
    return cluster, plan.problems


def _step_seconds(plan: Plan, context: float, efficiency: float) -> Callable[[int], float]:
    """Seconds of a decoding step, by its number of sequences: the longer of its reads and its operations, with the
    sequences spread evenly."""
    engine, rollout, hardware = plan.facts.engine, plan.planned.recipe.rollout, plan.hardware
    assert engine is not None
    shape = plan.facts.shape
    flops = forward_flops_per_token(shape, plan.facts.parameters, round(2 * context))

    @cache
    def step_s(sequences: int) -> float:
        each = max(1.0, sequences / rollout.num_engines)
        in_group = each / rollout.engine_attention_dp
        read = decoding_step_bytes(shape, engine, sequences=each, in_group=in_group, context=context)
        read_s = read / (hardware.links.memory_gb_per_s * GB)
        compute_s = each * flops / (rollout.engine_tp * hardware.peak_tflops * TERA)
        return max(read_s, compute_s) / efficiency

    return step_s
