"""The processes of a run: engines and trainer, started in the order that the memory of their devices asks for.

They start side by side, since both spend their start importing. Where they hand memory to each other
(`rollout.colocated`) it is one after the other, for an engine takes a share of what it finds free:

1. The trainer is built and has its weights, and on a resume its optimizer's state.
2. It gives all of its memory away.
3. The engines start. This is the first row of the table in hand_over.py, on which a run goes on.
"""

import logging
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from slimrl.config.schema import Recipe
from slimrl.data.training import MemoryPart
from slimrl.observability.progress import Progress
from slimrl.observability.run_folder import RunFolder
from slimrl.runtime.engine_group import EngineGroup
from slimrl.runtime.reservation import Reservation
from slimrl.runtime.trainer_group import TrainerGroup

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Processes:
    """The started parts; None for what the command does not need."""

    engines: EngineGroup | None
    trainers: TrainerGroup | None

    @property
    def roles(self) -> tuple[tuple[str, int], ...]:
        """(what it is, process id) of each, engines first."""
        return tuple(role for part in (self.engines, self.trainers) if part is not None for role in part.roles)


def start_processes(
    recipe: Recipe,
    folder: RunFolder,
    progress: Progress,
    ends: ExitStack,
    places: Reservation,
    *,
    total_updates: int | None,
    checkpoint: Path | None,
) -> Processes:
    """
    Args:
        ends: gets what ends them.
        total_updates: optimizer updates of the run; None for no trainer.
        checkpoint: of a run, which the trainer goes on from; None for the weights that the recipe names.

    Raises:
        StageError: a process did not start.
    """
    engines = trainers = None
    in_turn = recipe.rollout.colocated and total_updates is not None
    # Engines end after the trainer, whenever they were started: they remove what it left in shared memory.
    engine_ends = ends.enter_context(ExitStack())
    if places.placement.engines and not in_turn:
        engines = _start_engines(recipe, folder, places, engine_ends)
    if total_updates is not None:
        trainers = TrainerGroup(recipe, folder, progress, places, total_updates=total_updates)
        ends.callback(trainers.kill)
        trainers.start(checkpoint)
        if places.placement.engines and in_turn:
            trainers.release_memory(list(MemoryPart))
            log.info("the trainer has given its memory away, and the engines start")
            engines = _start_engines(recipe, folder, places, engine_ends)
    if engines is not None:
        engines.wait_ready()
    return Processes(engines=engines, trainers=trainers)


def _start_engines(recipe: Recipe, folder: RunFolder, places: Reservation, ends: ExitStack) -> EngineGroup:
    engines = EngineGroup(recipe, folder, Path(recipe.model.path), places)
    ends.callback(engines.stop)
    return engines
