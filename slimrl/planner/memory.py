"""Bytes on a GPU of each pipeline stage, by part and by what is done at the time.

Who holds memory when is what the run does (slimrl/runtime/hand_over.py): with `rollout.colocated` trainer and engines
give theirs away in turns, otherwise a GPU belongs to one of them and keeps everything.
"""

from dataclasses import dataclass

from slimrl.config.schema import Recipe
from slimrl.planner.activations import logits_bytes, stage_activations
from slimrl.planner.engine import GIB
from slimrl.planner.facts import Facts
from slimrl.planner.hardware import Hardware
from slimrl.planner.model_state import state_bytes
from slimrl.planner.parameters import Stage
from slimrl.planner.schedule import Batch

TRAIN = ("weights", "gradients", "optimizer", "activations", "logits", "resync", "reserve")
EXCHANGE = ("weights", "engine_weights", "resync", "reserve")
SAVE = ("weights", "optimizer", "engine_weights", "resync", "reserve")
ROLLOUT = ("engine_weights", "kv_cache", "resync", "reserve")
"""Parts that a colocated GPU holds at a time; a GPU that the trainer has to itself holds those of TRAIN."""


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
    if facts.engine is None or recipe.rollout.colocated:
        return None
    return facts.engine.weights + facts.engine.kv_cache + facts.slot_bytes + round(hardware.reserve_gib * GIB)


def stage_memory(
    facts: Facts, recipe: Recipe, stage: Stage, layers: list[int], index: int, batch: Batch, hardware: Hardware
) -> StageMemory:
    """Of a rank of pipeline stage `index` that also sends, which the busiest rank does."""
    trainer = recipe.trainer
    state = state_bytes(stage, trainer)
    shared = facts.engine if recipe.rollout.colocated else None
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
    phases: dict[str, tuple[str, ...]] = {"train": TRAIN}
    if shared:
        phases |= {"exchange": EXCHANGE, "save": SAVE, "rollout": ROLLOUT}
    return StageMemory(
        parts=parts,
        host=state.host + (state.weights + state.optimizer if shared else 0),
        phases={name: sum(parts[part] for part in held) for name, held in phases.items()},
    )
