"""Starting a run, and ending every process that it started whatever happens.

What can be refused is refused by `prepare`, before anything starts. `started` then brings up Ray, the engines and the
trainer (processes.py) and takes them down again; a signal that asks the driver to end takes the same way out.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TypeVar

import yaml

from slimrl.config.check import check_loaded
from slimrl.config.load import Command, LoadedRecipe, read_recipe
from slimrl.config.problems import RecipeError
from slimrl.config.schema import Recipe
from slimrl.config.show import changed_settings, dump_resolved, resolved_dict
from slimrl.models.hf_config import read_hf_config
from slimrl.observability.folder_lock import folder_lock
from slimrl.observability.logs import log_to_file
from slimrl.observability.progress import Progress
from slimrl.observability.provenance import append_provenance, collect_provenance
from slimrl.observability.run_folder import RunFolder, open_run_folder, set_aside
from slimrl.resync.shared_buffer import clean_stale_segments
from slimrl.rewards.comparers import close_comparers
from slimrl.runtime.cluster import ray_cluster
from slimrl.runtime.ending import Family, ending_on_signals, what_is_left
from slimrl.runtime.engine_group import EngineGroup
from slimrl.runtime.errors import RunError, StageError
from slimrl.runtime.folder_check import check_nodes
from slimrl.runtime.placement import most_slots, place
from slimrl.runtime.processes import Processes, start_processes
from slimrl.runtime.reservation import Reservation, cluster_nodes
from slimrl.runtime.rollout_stage import RolloutStage
from slimrl.runtime.start_check import read_files
from slimrl.runtime.state import CheckpointFolder
from slimrl.runtime.task import Task
from slimrl.runtime.versions_folder import versions_folder

T = TypeVar("T")

ATTEMPT_WAITS_S = 180.0
"""For the attempt before to end: its processes have their deadlines, and on NFS 4 the locks of a node that is lost end
with its lease (90 s)."""

log = logging.getLogger(__name__)


def prepare(
    path: Path,
    overrides: Sequence[str],
    command: Command,
    progress: Progress,
    read: Callable[[LoadedRecipe], T],
    *,
    ray_address: str | None = None,
) -> tuple[LoadedRecipe, T]:
    """The checked recipe, whose model is a complete checkpoint, and what `read` makes of it; warnings are said.

    Args:
        read: the rest that the command needs of what the recipe names, such as its task.
        ray_address: as for `started`, which tries the folders of the nodes there.

    Raises:
        RecipeError: it is refused, with all the reasons that can be seen at once.
    """
    loaded, problems = read_recipe(path, overrides, command)
    if loaded is None:
        raise RecipeError(problems)
    for problem in check_loaded(loaded):
        if problem.warning:
            progress.say(str(problem))
        else:
            problems.append(problem)
    return loaded, read_files(loaded, problems, read, shared_only=ray_address is not None)


@contextmanager
def open_run(
    loaded: LoadedRecipe,
    progress: Progress,
    *,
    resume: bool | None = False,
    overwrite: bool = False,
    job: str | None = None,
    checkpoint_log: Path | None = None,
) -> Iterator[RunFolder]:
    """The run's folder with what it is made of; the driver's log goes there from here on.

    No other process can open it meanwhile. Settings that differ from those that a resumed run started with are said.

    Args:
        resume: continue an existing run; None to do so if it has a checkpoint, and else to put what is there aside.
            With None a process that is at work in it is waited for: the attempt before may still be ending.
        job: id of a job of which this is an attempt. A run that an earlier attempt opened is taken up as with None;
            `resume` and `overwrite` are about runs of others.
        checkpoint_log: as in `RunFolder`.

    Raises:
        ValueError: see `open_run_folder` and `versions_folder`; or another process is at work in it.
    """
    recipe = loaded.recipe
    earlier = RunFolder(Path(recipe.run.dir) / recipe.run.name)
    if job is not None and earlier.is_of_job(job):
        resume, overwrite = None, False
    with ExitStack() as locks:
        wait_s = ATTEMPT_WAITS_S if resume is None else 0.0
        if earlier.config.is_file():
            locks.enter_context(folder_lock(earlier.path, wait_s=wait_s, say=progress.say))
        if loaded.command == "train":
            locks.enter_context(versions_folder(loaded, wait_s=wait_s, say=progress.say))
        if resume is None:
            resume = earlier.has_checkpoint
            if not resume and (aside := set_aside(earlier)):
                progress.say(
                    f"{earlier.path} is started anew; a run without a checkpoint was there, which is now {aside}"
                )
        if not resume and earlier.ended_early.is_file():
            progress.say(f"{earlier.path} is started anew; a run that ended before its first step was there")
            overwrite = True
        folder = open_run_folder(
            Path(recipe.run.dir),
            recipe.run.name,
            dump_resolved(loaded),
            resume=resume,
            overwrite=overwrite,
            job=job,
            claim=lambda path: locks.enter_context(folder_lock(path, say=progress.say)),
        )
        folder = RunFolder(folder.path, checkpoint_log)
        for change in changed_settings(yaml.safe_load(folder.config.read_text()), resolved_dict(loaded)):
            progress.say(f"another setting than the run started with: {change}")
        folder.requeue.unlink(missing_ok=True)
        folder.ended_early.unlink(missing_ok=True)
        command = [loaded.environment.hide(argument) for argument in sys.argv]
        append_provenance(folder.provenance, collect_provenance(resolved_dict(loaded), loaded.provenance, command))
        log_to_file(folder.log_file("driver"), hide=loaded.environment.hide)
        yield folder


@contextmanager
def started(
    recipe: Recipe,
    folder: RunFolder,
    progress: Progress,
    *,
    with_engines: bool,
    total_updates: int | None,
    checkpoint: Path | None = None,
    ray_address: str | None = None,
) -> Iterator[Processes]:
    """Engines that answer and a trainer that has loaded its weights; who holds memory is `HandOver`'s to say.

    Args:
        total_updates: optimizer updates of the run; None for a command without a trainer.
        checkpoint: of a run, which the trainer goes on from; None to start from the weights that the recipe names.
        ray_address: HOST:PORT of the cluster to run on; None for one of its own on this machine.

    Raises:
        StageError: a process did not start, the cluster is too small, or nodes cannot write their folders.
    """
    num_ranks = 0 if total_updates is None else recipe.trainer.num_ranks
    num_engines = recipe.rollout.num_engines if with_engines else 0
    for name in clean_stale_segments():
        log.info("removed shared memory that an earlier run left: %s", name)
    with (
        ending_on_signals(partial(what_is_left, folder)) as take_over_signals,
        ExitStack() as shown,
        ExitStack() as ends,
    ):
        family = Family()
        ends.callback(clean_stale_segments)
        ends.callback(folder.note_early_end)
        # Nobody writes a checkpoint any more when all processes have ended. Those of other nodes may take a moment
        # longer; what they write then is removed by the next start.
        ends.callback(CheckpointFolder(folder.checkpoints).clean)
        ends.callback(family.end)
        ends.callback(close_comparers)
        with progress.stage("starting Ray"):
            slots = most_slots(recipe, num_ranks=num_ranks, num_engines=num_engines)
            ends.enter_context(ray_cluster(ray_address, num_slots=slots))
            take_over_signals()
            nodes, resource = cluster_nodes(private=ray_address is None)
            placement = place(recipe, nodes, num_ranks=num_ranks, num_engines=num_engines, unit=f"{resource}s")
            places = Reservation(placement, resource)
            if ray_address is not None:
                check_nodes(recipe, places)
        processes = Processes(engines=None, trainers=None)
        try:
            with progress.stage("starting processes"):
                processes = start_processes(
                    recipe, folder, progress, ends, places, total_updates=total_updates, checkpoint=checkpoint
                )
            log.info("process %d: driver", os.getpid())
            for role, pid in processes.roles:
                log.info("process %d: %s", pid, role)
            yield processes
            if processes.trainers is not None:
                processes.trainers.close()
        except ValueError as error:
            # The user's input has been accepted by now, so this is no refusal.
            raise RunError(f"{type(error).__name__}: {error}") from error
        except RunError as error:
            _raise_if_engine_ended(processes.engines, error)
            raise
        finally:
            family.note()
            shown.enter_context(progress.stage("ending processes"))


def _raise_if_engine_ended(engines: EngineGroup | None, error: RunError) -> None:
    """Raises StageError with the engine's own cause where an engine that ended is what stands behind `error`."""
    if engines is None or not engines.addresses:
        return
    try:
        engines.check()
    except StageError as cause:
        log.error("because of it: %s", error)
        raise cause from error


def rollout_stage(recipe: Recipe, task: Task, engines: EngineGroup, progress: Progress) -> RolloutStage:
    """Episodes on these engines, whose client is told what it needs to know of the model."""
    config = read_hf_config(Path(recipe.model.path))
    shape = None
    if recipe.rollout.routed_experts:
        shape = (int(config["num_hidden_layers"]), int(config["num_experts_per_tok"]))
    client = engines.client(vocab_size=int(config["vocab_size"]), routed_experts_shape=shape)
    return RolloutStage(recipe, task, client, progress, watch=engines.watch, flush_caches=engines.flush_caches)


@contextmanager
def logs_of_command(directory: str, command: str, loaded: LoadedRecipe) -> Iterator[RunFolder]:
    """Where a command that is no training run keeps its logs: `<directory>/<command>-<time>/logs`."""
    folder = RunFolder(Path(directory) / f"{command}-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}")
    folder.logs.mkdir(parents=True)
    log_to_file(folder.log_file("driver"), hide=loaded.environment.hide)
    yield folder
