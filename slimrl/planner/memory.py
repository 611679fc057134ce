"""Bytes on a GPU of each pipeline stage, by part and by what is done at the time.

Who holds memory when is what the run does (slimrl/runtime/hand_over.py): with `rollout.colocated` trainer and engines
give theirs away in turns. Otherwise each keeps everything, on GPUs of its own, or with `ipc` on the same ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from slimrl.config.devices import shares_devices
from slimrl.config.schema import Recipe
from slimrl.planner.activations import logits_bytes, stage_activations
from slimrl.planner.engine import GIB
from slimrl.planner.facts import Facts
from slimrl.planner.hardware import Hardware
from slimrl.planner.model_state import state_bytes
from slimrl.planner.parameters import Stage
from slimrl.planner.schedule import Batch

TRAINER_BUILT = ("weights", "gradients", "optimizer", "reserve")
ENGINES_STARTED = ("engine_weights", "kv_cache", "reserve")
TRAIN = ("weights", "gradients", "optimizer", "activations", "logits", "resync", "reserve")
EXCHANGE = ("weights", "engine_weights", "resync", "reserve")
SAVE = ("weights", "optimizer", "engine_weights", "resync", "reserve")
ROLLOUT = ("engine_weights", "kv_cache", "resync", "reserve")
TOGETHER = (*TRAIN, "engine_weights", "kv_cache")
"""Parts that a GPU holds at a time. A colocated one starts with the first two, one after the other, and goes on with
the next four; one that the trainer has to itself holds those of TRAIN, one on which both keep everything those of
TOGETHER."""


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Of one GPU."""

    parts: dict[str, int]
    """Bytes: weights, gradients, optimizer, activations, logits, resync, engine_weights, kv_cache, reserve"""
    host: int
    """Bytes in the memory of the host: of the optimizer if it is offloaded, and what a colocated trainer gives away"""
    phases: dict[str, int]
    """What is done -> bytes held meanwhile"""

    @property
    def total(self) -> int:
        return max(self.phases.values())


def engine_gpu_bytes(facts: Facts, recipe: Recipe, hardware: Hardware) -> int | None:
    """Held on a GPU that an engine has to itself, slots of a receiver included; None where there is no such GPU."""
    if facts.engine is None or shares_devices(recipe):
        return None
    return facts.engine.weights + facts.engine.kv_cache + facts.slot_bytes + round(hardware.reserve_gib * GIB)


def host_bytes_per_node(recipe: Recipe, memory: Sequence[StageMemory], hardware: Hardware) -> int:
    """What trainer ranks of one node keep in its host's memory, were all of the stage that keeps most there."""
    return min(hardware.gpus_per_node, recipe.trainer.num_ranks) * max(stage.host for stage in memory)


def stage_memory(
    facts: Facts, recipe: Recipe, stage: Stage, layers: list[int], index: int, batch: Batch, hardware: Hardware
) -> StageMemory:
    """Of a rank of pipeline stage `index` that also sends, which the busiest rank does."""
    trainer = recipe.trainer
    state = state_bytes(stage, trainer)
    shared = facts.engine if shares_devices(recipe) else None
    last = index == trainer.parallel.pipeline - 1
    parts = {
        "weights": state.weights,
        "gradients": state.gradients,
        "optimizer": state.optimizer,
        "activations": stage_activations(
            facts.shape,
            trainer,
            layers,
            index,
            micro_batches=batch.micro_batches,
            expert_load=hardware.expert_load,
        ),
        "logits": logits_bytes(facts.shape, trainer) if last else 0,
        "resync": facts.slot_bytes,
        "engine_weights": shared.weights if shared else 0,
        "kv_cache": shared.kv_cache if shared else 0,
        "reserve": round(hardware.reserve_gib * GIB),
    }
    handed_over = shared is not None and recipe.rollout.colocated
    return StageMemory(
        parts=parts,
        host=state.host + (state.weights + state.optimizer if handed_over else 0),
        phases=_phases(parts, shared=shared is not None, handed_over=handed_over),
    )


def _phases(parts: dict[str, int], *, shared: bool, handed_over: bool) -> dict[str, int]:
    """Bytes held at a time, by what is done."""

    def total(held: tuple[str, ...]) -> int:
        return sum(parts[part] for part in held)

    if not shared:
        return {"train": total(TRAIN)}
    if not handed_over:
        return {"together": total(TOGETHER)}
    return {
        "start": max(total(TRAINER_BUILT), total(ENGINES_STARTED)),
        "train": total(TRAIN),
        "exchange": total(EXCHANGE),
        "save": total(SAVE),
        "rollout": total(ROLLOUT),
    }
