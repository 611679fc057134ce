"""Memory of every pipeline stage and time of a step for one layout of the trainer, and whether it fits."""

from collections.abc import Iterator
from dataclasses import dataclass

from slimrl.algorithms.passes import num_passes
from slimrl.config.rollout_rules import LARGER_ENGINES, MORE_NODES
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.rollout import RolloutConfig, RolloutMode
from slimrl.estimates.planner.communication import Communication, logprob_communication, update_communication
from slimrl.estimates.planner.engine import GIB, EnginePlan
from slimrl.estimates.planner.facts import Facts
from slimrl.estimates.planner.hardware import Hardware
from slimrl.estimates.planner.memory import StageMemory, engine_gpu_bytes, host_bytes_per_node, stage_memory
from slimrl.estimates.planner.model_state import host_update_s
from slimrl.estimates.planner.parameters import Stage
from slimrl.estimates.planner.schedule import Batch, update_batch
from slimrl.estimates.planner.work import Work, step_work


@dataclass(frozen=True, kw_only=True)
class LayoutPlan:
    recipe: Recipe
    stages: list[Stage]
    layers: list[list[int]]
    """Indices of the layers of each pipeline stage"""
    memory: list[StageMemory]
    """Memory of a rank of each pipeline stage"""
    engine_gpu: int | None
    """Bytes on an engine's own GPU; None if engines share the trainer's"""
    batch: Batch
    work: Work
    communication: Communication
    """Communication of one update"""
    logprobs: Communication | None
    """Communication of a log-prob pass over the tokens of one update; None with `slimrl sft`"""
    host_update_s: float
    """Seconds of one update with an optimizer on the host; else 0"""
    updates: int
    """Number of updates per step"""
    problems: list[str]
    """Reasons why the layout does not fit"""
    adapters: list[Stage] | None = None
    """Parameters of the adapters on each pipeline stage; None if the model's own weights are trained"""

    @property
    def fits(self) -> bool:
        return not self.problems

    @property
    def worst(self) -> int:
        """The stage with the highest memory peak."""
        return max(range(len(self.memory)), key=lambda stage: self.memory[stage].total)

    @property
    def most_bytes(self) -> int:
        """Bytes of the peak of any GPU."""
        return max(self.memory[self.worst].total, self.engine_gpu or 0)

    @property
    def communication_s(self) -> float:
        """Seconds of communication in all updates of a step, and in the passes before them."""
        logprobs_s = num_passes(self.recipe) * self.logprobs.total_s if self.logprobs else 0.0
        return self.updates * self.communication.total_s + logprobs_s

    @property
    def training_s(self) -> float:
        """Seconds of the log-probs and updates of a step, with no communication overlapped."""
        return self.work.training_s + self.work.logprob_s + self.communication_s + self.updates * self.host_update_s

    @property
    def overlaps(self) -> bool:
        """Whether the engines sample while the trainer trains."""
        return bool(self.work.rollout_at_least_s) and self.recipe.rollout.mode is not RolloutMode.sync

    @property
    def step_s(self) -> float:
        """Seconds of training and the shortest possible rollout, without the resync: their sum, or the longer one where
        they overlap."""
        parts = (self.training_s, self.work.rollout_at_least_s)
        return max(parts) if self.overlaps else sum(parts)


def plan_layout(
    facts: Facts,
    recipe: Recipe,
    stages: list[Stage],
    layers: list[list[int]],
    hardware: Hardware,
    *,
    sft: bool,
    mean_tokens: int | None,
) -> LayoutPlan:
    """
    Args:
        stages: parameters of a rank of each pipeline stage.
        mean_tokens: as for update_batch.
    """
    batch = update_batch(recipe, sft=sft, mean_tokens=mean_tokens)
    adapters = None if facts.adapters is None else facts.adapters.stages(recipe.trainer.parallel, layers)
    of_stage = [None] * len(stages) if adapters is None else adapters
    memory = [
        stage_memory(facts, recipe, stage, layers[index], index, batch, hardware, of_stage[index])
        for index, stage in enumerate(stages)
    ]
    engine_gpu = engine_gpu_bytes(facts, recipe, hardware)
    return LayoutPlan(
        recipe=recipe,
        stages=stages,
        adapters=adapters,
        layers=layers,
        memory=memory,
        batch=batch,
        work=step_work(
            recipe,
            facts.shape,
            facts.parameters,
            batch,
            hardware,
            engine=facts.engine,
            mtp=facts.model.mtp_layers if recipe.trainer.mtp.train else 0,
        ),
        communication=update_communication(facts.shape, recipe.trainer, adapters or stages, layers, batch, hardware),
        logprobs=None if sft else logprob_communication(facts.shape, recipe.trainer, layers, batch, hardware),
        host_update_s=max(
            host_update_s(stage, recipe.trainer, hardware, own) for stage, own in zip(stages, of_stage, strict=True)
        ),
        updates=1 if sft else recipe.trainer.updates_per_rollout,
        engine_gpu=engine_gpu,
        problems=_problems(facts, recipe, memory, engine_gpu, hardware),
    )


def _problems(
    facts: Facts, recipe: Recipe, memory: list[StageMemory], engine_gpu: int | None, hardware: Hardware
) -> list[str]:
    limit = round(hardware.gpu_memory_gib * GIB)
    problems = []
    for index, stage in enumerate(memory):
        for phase, nbytes in stage.phases.items():
            if nbytes > limit:
                part = stage.largest(phase)
                most = f"the largest part is {part} with {stage.parts[part] / GIB:.1f}"
                problems.append(
                    f"{phase}, stage {index}: {nbytes / GIB:.1f} GiB of {hardware.gpu_memory_gib:g}, {most}"
                )
    if engine_gpu is not None and engine_gpu > limit:
        problems.append(f"an engine's GPU: {engine_gpu / GIB:.1f} GiB of {hardware.gpu_memory_gib:g}")
    host = host_bytes_per_node(recipe, memory, hardware)
    if host > hardware.host_memory_gib * GIB:
        problems.append(f"host memory of a node: {host / GIB:,.0f} GiB of {hardware.host_memory_gib:,g}")
    return (
        problems
        if facts.engine is None
        else [
            *problems,
            *engine_problems(facts.engine, recipe.rollout, hardware, in_fp8=facts.transform is not None),
        ]
    )


def engine_problems(engine: EnginePlan, rollout: RolloutConfig, hardware: Hardware, *, in_fp8: bool) -> Iterator[str]:
    """Reasons why engines cannot start, or cannot generate the longest trajectory.

    Args:
        in_fp8: the engines' weights are in block FP8 already.
    """
    larger_gpus = f"GPUs with more memory than {hardware.gpu_memory_gib:g} GiB (--gpu-memory-gib)"
    elsewhere = f"{MORE_NODES}, or take {larger_gpus}." if in_fp8 else f"{LARGER_ENGINES} Or take {larger_gpus}."
    if engine.trajectories == 0:
        # An engine that fills its nodes cannot grow there, and no fraction of too little memory is enough.
        larger = rollout.engine_tp < rollout.engine_nodes * hardware.gpus_per_node
        left = (hardware.gpu_memory_gib - hardware.reserve_gib) * GIB - engine.weights
        raised = ["rollout.engine_tp"] if larger else []
        raised += ["rollout.sglang.mem_fraction_static"] if left > 0 else []
        raise_these = f"; raise {' or '.join(raised)}" if raised else ""
        yield (
            f"engines: {_no_cache(engine, rollout, hardware, left)}{raise_these}{'' if larger else f'. {elsewhere}'}"
        )
    if rollout.engine_tp > rollout.engine_nodes * hardware.gpus_per_node:
        where = "one node, which has" if rollout.engine_nodes == 1 else f"{rollout.engine_nodes} nodes, which each have"
        yield (
            f"rollout.engine_tp: {rollout.engine_tp} GPUs, but an engine runs on {where} {hardware.gpus_per_node}. "
            f"{f'{MORE_NODES}.' if in_fp8 else LARGER_ENGINES}"
        )


def _no_cache(engine: EnginePlan, rollout: RolloutConfig, hardware: Hardware, left: float) -> str:
    if left <= 0:
        return f"weights of {engine.weights / GIB:.1f} GiB leave no room in a GPU's {hardware.gpu_memory_gib:g} GiB"
    return f"{engine.kv_tokens:,} tokens of KV cache hold no trajectory of {rollout.max_trajectory_tokens:,}"
