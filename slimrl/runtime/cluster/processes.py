"""The processes of a run, engines and trainer, started in the order that device memory requires.

They start in parallel, since both spend most of their start importing. With `rollout.colocated` they start one after
the other, since an engine takes a fraction of the memory that it finds free:

1. The trainer is built and loads its weights, and on a resume its optimizer's state.
2. It releases all of its memory.
3. The engines start. This is the first row of the table in memory_phases.py.

A teacher's engines have devices of their own, start first and are waited for last, and so do those of older versions of
the policy. The ranks of a critic, too, have devices of their own, and start after the trainer's.
"""

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from slimrl.checkpoints.digests import FileDigest
from slimrl.config.critic import critic_recipe
from slimrl.config.past_versions import past_recipe
from slimrl.config.schema.recipe import Recipe
from slimrl.config.teacher import teacher_recipe
from slimrl.data.training import MemoryPart
from slimrl.engines.servers.server import PAST, TEACHER
from slimrl.observability.progress import Progress
from slimrl.observability.run_folder import RunFolder
from slimrl.runtime.cluster.engine_group import EngineGroup
from slimrl.runtime.cluster.reservation import Reservation
from slimrl.runtime.cluster.spare_nodes import SpareNodes
from slimrl.runtime.cluster.trainer_group import CRITIC, TrainerGroup

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Processes:
    """The engines and ranks of a run; None for those that the command does not need."""

    engines: EngineGroup | None
    trainers: TrainerGroup | None
    teachers: EngineGroup | None = None
    past: EngineGroup | None = None
    critics: TrainerGroup | None = None
    spares: SpareNodes | None = None

    @property
    def roles(self) -> tuple[tuple[str, int], ...]:
        """(role, pid) of each process, engines first."""
        parts = (self.engines, self.teachers, self.past, self.trainers, self.critics)
        return tuple(role for part in parts if part is not None for role in part.roles)


def start_processes(
    recipe: Recipe,
    folder: RunFolder,
    progress: Progress,
    ends: ExitStack,
    places: Reservation,
    *,
    total_updates: int | None,
    checkpoint: Path | None,
    files: Mapping[str, FileDigest] | None,
    spares: SpareNodes | None,
) -> Processes:
    """Start the processes of a run; see `start.started`. `ends` gets the callbacks that end them.

    Raises:
        StageError: a process did not start.
    """
    engines = trainers = teachers = past = critics = None
    in_turn = recipe.rollout.colocated and total_updates is not None
    # Engines end after the trainer: they remove its leftovers in shared memory.
    engine_ends = ends.enter_context(ExitStack())
    if places.placement.teachers:
        teachers = EngineGroup(teacher_recipe(recipe), folder, progress, places, TEACHER)
        engine_ends.callback(teachers.stop)
    if places.placement.past:
        past = EngineGroup(past_recipe(recipe), folder, progress, places, PAST)
        engine_ends.callback(past.stop)
    if places.placement.engines and not in_turn:
        engines = _start_engines(recipe, folder, progress, places, engine_ends)
    if total_updates is not None:
        of_policy = total_updates
        if places.placement.critics:
            # Its schedule begins with its first update.
            of_policy -= recipe.critic.warmup_steps * recipe.trainer.updates_per_rollout
        trainers = TrainerGroup(recipe, folder, progress, places, total_updates=of_policy, spares=spares)
        ends.callback(trainers.kill)
        if places.placement.critics:
            critics = TrainerGroup(
                critic_recipe(recipe), folder, progress, places, CRITIC, total_updates=total_updates, spares=spares
            )
            ends.callback(critics.kill)
        trainers.start(checkpoint, files)
        if critics is not None:
            critics.start(checkpoint)
        if places.placement.engines and in_turn:
            trainers.release_memory(list(MemoryPart))
            log.info("the trainer has released its memory; starting the engines")
            engines = _start_engines(recipe, folder, progress, places, engine_ends)
    for group in (engines, teachers, past):
        if group is not None:
            group.wait_ready()
    return Processes(engines=engines, trainers=trainers, teachers=teachers, past=past, critics=critics, spares=spares)


def _start_engines(
    recipe: Recipe, folder: RunFolder, progress: Progress, places: Reservation, ends: ExitStack
) -> EngineGroup:
    engines = EngineGroup(recipe, folder, progress, places)
    ends.callback(engines.stop)
    return engines
