"""At least how long a run waits for a trainer that is started anew in place, and for a new job in its stead.

Both compare the newest checkpoint with its checksums, read it, each with all nodes of the trainer, and send the weights
to the engines. A new job starts its engines too, and each of their nodes reads the model. From a copy in memory a
trainer that is started anew in place reads nothing from the disk, and compares nothing. None has the start of processes
and communication groups, the engines' CUDA graphs, nor the wait for nodes.
"""

from dataclasses import dataclass

from slimrl.config.schema.recipe import Recipe
from slimrl.estimates.planner.hardware import GB, Hardware
from slimrl.estimates.planner.save import GATHERED_BYTES

LOST_OF_INTERVAL = 0.5
"""Steps that are lost on average, over the steps between two checkpoints"""
LOST_OF_COPIES = 1.5
"""The same of copies in memory, if one takes until the next is due: until it is whole, the one before counts"""


@dataclass(frozen=True, kw_only=True)
class Restart:
    checkpoint_bytes: int
    checkpoint_s: float
    """Seconds in which all nodes of the trainer read the checkpoint"""
    engines_s: float
    """Seconds in which all nodes of engines read the model; 0 without engines"""
    resync_s: float
    lost_s: float | None
    """Seconds of the steps that are lost on average; None if no checkpoint is written before the end"""
    lost_from_copy_s: float | None
    """The same with a copy in memory, if each is whole before the next is due; None without copies"""
    in_place: bool = True
    """Whether the run starts a trainer anew in place (`run.max_restarts`)"""

    @property
    def in_place_s(self) -> float | None:
        """From a checkpoint on the disk; None if the trainer is not started anew in place."""
        return self._from_disk_s if self.in_place else None

    @property
    def from_copy_s(self) -> float | None:
        """In place, from a copy in memory; None without one."""
        return None if self.lost_from_copy_s is None else self.resync_s

    @property
    def new_job_s(self) -> float:
        return self._from_disk_s + self.engines_s

    @property
    def _from_disk_s(self) -> float:
        return 2 * self.checkpoint_s + self.resync_s


def plan_restart(
    recipe: Recipe,
    total: int,
    adapters: int | None,
    hardware: Hardware,
    *,
    step_s: float,
    sent_bytes: int,
    resync_s: float,
) -> Restart:
    """
    Args:
        total: number of the model's parameters.
        adapters: number of parameters that are trained, if these are adapters.
        step_s: seconds of a step.
        sent_bytes: bytes of a resync, and of the model that an engine reads; 0 without engines.
        resync_s: seconds of a resync.
    """
    weight, trained = recipe.trainer.precision.element_bytes, total if adapters is None else adapters
    nbytes = weight * (total + (adapters or 0)) + GATHERED_BYTES * trained
    engine_nodes = -(-recipe.rollout.num_engines * recipe.rollout.engine_tp // hardware.gpus_per_node)
    every, copied = recipe.checkpoint.every_steps, recipe.checkpoint.in_memory_every_steps
    in_place = recipe.run.max_restarts > 0
    return Restart(
        checkpoint_bytes=nbytes,
        checkpoint_s=_read_s(nbytes, -(-recipe.trainer.num_ranks // hardware.gpus_per_node), hardware),
        engines_s=_read_s(engine_nodes * sent_bytes, engine_nodes, hardware),
        resync_s=resync_s,
        lost_s=every * LOST_OF_INTERVAL * step_s if every else None,
        lost_from_copy_s=copied * LOST_OF_COPIES * step_s if copied and in_place else None,
        in_place=in_place,
    )


def _read_s(nbytes: int, nodes: int, hardware: Hardware) -> float:
    """Seconds in which so many nodes together read so many bytes from the shared file system."""
    links = hardware.links
    return nbytes / (GB * min(links.disk_read_total_gb_per_s, nodes * links.disk_read_gb_per_s))
