"""Bytes on a GPU of each pipeline stage, by part and by phase of a step.

With `rollout.colocated` trainer and engines release memory to each other (slimrl/runtime/cluster/memory_phases.py).
Otherwise each keeps everything, on GPUs of its own, or with `ipc` on the same ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from slimrl.algorithms.passes import needs_reference
from slimrl.config.schema.precision import Fp8Scaling
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.trainer import TrainerConfig
from slimrl.estimates.planner.activations import logits_bytes, stage_activations
from slimrl.estimates.planner.engine import GIB
from slimrl.estimates.planner.facts import Facts
from slimrl.estimates.planner.hardware import Hardware
from slimrl.estimates.planner.model_state import state_bytes
from slimrl.estimates.planner.parameters import Stage, stage_total
from slimrl.estimates.planner.save import node_copy_bytes, node_save_bytes
from slimrl.estimates.planner.schedule import Batch

Phases = dict[str, tuple[tuple[str, ...], ...]]
"""Phase -> the parts that a GPU holds at a time; several where it holds one set of them after the other."""

TRAIN = ("weights", "fp8_weights", "gradients", "optimizer", "activations", "logits", "resync", "reserve")
ALONE: Phases = {"train": (TRAIN,)}
TOGETHER: Phases = {"together": ((*TRAIN, "engine_weights", "kv_cache"),)}
COLOCATED: Phases = {
    # The trainer is built before engines start.
    "start": (("weights", "gradients", "optimizer", "reserve"), ("engine_weights", "kv_cache", "reserve")),
    "train": (TRAIN,),
    "exchange": (("weights", "engine_weights", "resync", "reserve"),),
    "save": (("weights", "optimizer", "engine_weights", "resync", "reserve"),),
    "rollout": (("engine_weights", "kv_cache", "resync", "reserve"),),
}
"""Phases of a GPU of the trainer alone, of one on which trainer and engine keep everything, and of a colocated one."""

FP8_COPY_BYTES = 2
"""Bytes for a parameter of FP8 training: Transformer Engine keeps each weight in FP8 from one micro-batch to the next,
as it is and transposed (pytorch/module/base.py, `_fp8_workspaces`). All parameters are counted, though norms,
embeddings and routers have none."""


def keeps_fp8_copies(trainer: TrainerConfig) -> bool:
    return trainer.fp8 is not Fp8Scaling.off and not trainer.fp8_emulation


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Memory of one GPU of a pipeline stage."""

    parts: dict[str, int]
    """Bytes: weights, fp8_weights, gradients, optimizer, activations, logits, resync, engine_weights, kv_cache,
    reserve"""
    host: int
    """Bytes of host memory: an offloaded optimizer, what a colocated trainer releases, the reference's weights"""
    saving: int
    """Bytes of host memory that a save takes in addition, of all ranks of the stage on a node"""
    copying: int
    """Bytes of the stage's files on a node of a checkpoint in memory"""
    held: dict[str, tuple[str, ...]]
    """Names of the parts that are held at the peak of each phase"""

    @property
    def phases(self) -> dict[str, int]:
        """Bytes of each phase."""
        return {phase: sum(map(self.parts.__getitem__, names)) for phase, names in self.held.items()}

    @property
    def total(self) -> int:
        return max(self.phases.values())

    def largest(self, phase: str) -> str:
        """Name of the largest part in a phase."""
        return max(self.held[phase], key=self.parts.__getitem__)


def engine_gpu_bytes(facts: Facts, recipe: Recipe, hardware: Hardware) -> int | None:
    """Bytes on an engine's own GPU, buffers of a receiver included; None if there is no such GPU."""
    if facts.engine is None or recipe.shares_devices:
        return None
    return facts.engine.weights + facts.engine.kv_cache + facts.slot_bytes + round(hardware.reserve_gib * GIB)


def host_bytes_per_node(recipe: Recipe, memory: Sequence[StageMemory], hardware: Hardware) -> int:
    """Host memory of a node's trainer ranks during a save, if all were of the stage that needs most of it."""
    ranks = min(hardware.gpus_per_node, recipe.trainer.num_ranks)
    held = ranks * max(stage.host for stage in memory) + copies_per_node(recipe, memory, hardware)
    return held + save_bytes_per_node(recipe, memory, hardware)


def copies_per_node(recipe: Recipe, memory: Sequence[StageMemory], hardware: Hardware) -> int:
    """Bytes of `host_bytes_per_node` of checkpoints in memory: the newest one and that which takes its place, where
    there are several nodes also of another node, and what is staged to write one."""
    if not recipe.checkpoint.in_memory_every_steps:
        return 0
    of_nodes = 2 if recipe.trainer.num_ranks > hardware.gpus_per_node else 1
    return (2 * of_nodes + 1) * _stages_of_node(recipe, hardware) * max(stage.copying for stage in memory)


def save_bytes_per_node(recipe: Recipe, memory: Sequence[StageMemory], hardware: Hardware) -> int:
    """Bytes of `host_bytes_per_node` that only a save needs."""
    return _stages_of_node(recipe, hardware) * max(stage.saving for stage in memory)


def _stages_of_node(recipe: Recipe, hardware: Hardware) -> int:
    """Pipeline stages of which a node has ranks."""
    ranks = min(hardware.gpus_per_node, recipe.trainer.num_ranks)
    return max(1, ranks * recipe.trainer.parallel.pipeline // recipe.trainer.num_ranks)


def stage_memory(
    facts: Facts,
    recipe: Recipe,
    stage: Stage,
    layers: list[int],
    index: int,
    batch: Batch,
    hardware: Hardware,
    adapters: Stage | None = None,
) -> StageMemory:
    """Memory of a rank of pipeline stage `index` that is also a sender of the resync, as the busiest rank is."""
    trainer = recipe.trainer
    state = state_bytes(stage, trainer, adapters)
    shared = facts.engine if recipe.shares_devices else None
    last = index == trainer.parallel.pipeline - 1
    mtp_layers = facts.model.mtp_layers if trainer.mtp.train and last else 0
    parts = {
        "weights": state.weights,
        "fp8_weights": FP8_COPY_BYTES * stage_total(stage) if keeps_fp8_copies(trainer) else 0,
        "gradients": state.gradients,
        "optimizer": state.optimizer,
        "activations": stage_activations(
            facts.shape,
            trainer,
            # An MTP layer is of the kind of the model's last one.
            [*layers, *[facts.shape.layers - 1] * mtp_layers],
            index,
            micro_batches=batch.micro_batches,
            expert_load=hardware.expert_load,
        ),
        "logits": logits_bytes(facts.shape, trainer, mtp_layers=mtp_layers) if last else 0,
        "resync": facts.slot_bytes,
        "engine_weights": shared.weights if shared else 0,
        "kv_cache": shared.kv_cache if shared else 0,
        "reserve": round(hardware.reserve_gib * GIB),
    }
    colocated = shared is not None and recipe.rollout.colocated
    phases = COLOCATED if colocated else TOGETHER if shared else ALONE
    return StageMemory(
        parts=parts,
        host=state.host
        + (state.weights + state.optimizer if colocated else 0)
        + (state.weights if needs_reference(recipe) and not recipe.trainer.lora.rank else 0),
        saving=node_save_bytes(stage, trainer, hardware.gpus_per_node, adapters),
        copying=node_copy_bytes(stage, trainer, hardware.gpus_per_node, adapters),
        held={phase: max(sets, key=lambda names: sum(parts[name] for name in names)) for phase, sets in phases.items()},
    )
