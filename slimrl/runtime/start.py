"""Starts a run, and ends every process that it started whatever happens.

`prepare` refuses a recipe with problems before anything starts. `started` starts Ray, the engines and the trainer
(processes.py) and ends them again, also when a signal ends the driver.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path

import yaml

from slimrl.agent.bounded_parser import close_parsers
from slimrl.base.errors import RunError, StageError
from slimrl.base.folder_lock import folder_lock
from slimrl.checkpoints.digests import FileDigest
from slimrl.config.check import check_loaded
from slimrl.config.load import Command, LoadedRecipe, read_recipe
from slimrl.config.problems import RecipeError
from slimrl.config.schema.recipe import Recipe
from slimrl.config.show import changed_settings, dump_resolved, resolved_dict
from slimrl.config.tracking_rules import missing_trackers
from slimrl.data.engine import Engine
from slimrl.engines.client import SglangEngine
from slimrl.engines.one_by_one import OneByOne
from slimrl.engines.routing import RoutedEngines
from slimrl.engines.teacher import Teacher
from slimrl.models.hf_config import read_hf_config
from slimrl.observability.logs import log_to_file
from slimrl.observability.progress import Progress
from slimrl.observability.provenance import append_provenance, collect_provenance
from slimrl.observability.run_folder import RunFolder, open_run_folder, set_aside
from slimrl.observability.samples import write_failed
from slimrl.resync.ipc.stale_files import clean_stale_segments
from slimrl.rewards.comparers import close_comparers
from slimrl.rollout.errors import TooManyFailed
from slimrl.rollout.stage import RolloutStage
from slimrl.rollout.task.task import Task
from slimrl.runtime.checks.fetched_model import fetch_model
from slimrl.runtime.checks.folder_check import check_nodes
from slimrl.runtime.checks.shared_memory_check import check_shared_memory
from slimrl.runtime.checks.start_check import read_files
from slimrl.runtime.checks.teacher_check import key_of_others
from slimrl.runtime.cluster.ending import ChildProcesses, ending_on_signals, what_is_left
from slimrl.runtime.cluster.engine_group import EngineGroup
from slimrl.runtime.cluster.episode_workers import EpisodeWorkers
from slimrl.runtime.cluster.placement import most_slots, place_what_fits
from slimrl.runtime.cluster.processes import Processes, start_processes
from slimrl.runtime.cluster.ray_cluster import ray_cluster
from slimrl.runtime.cluster.reservation import Reservation, cluster_nodes
from slimrl.runtime.cluster.sandbox_nodes import NodeSandboxes
from slimrl.runtime.cluster.spare_nodes import SpareNodes, check_spares, split_spares
from slimrl.runtime.state import CheckpointFolder
from slimrl.runtime.versions_folder import versions_folder

ATTEMPT_WAITS_S = 180.0
"""How long to wait until the job's previous attempt has ended. Its processes have deadlines, and on NFS 4 the locks of
a lost node end with its lease (90 s)."""

log = logging.getLogger(__name__)


def prepare[T](
    path: Path,
    overrides: Sequence[str],
    command: Command,
    progress: Progress,
    read: Callable[[LoadedRecipe], T],
    *,
    ray_address: str | None = None,
) -> tuple[LoadedRecipe, T]:
    """Check the recipe and its model, and read its files; print warnings. A model of the Hub is fetched.

    Args:
        read: reads the files that the command needs, such as the task's; its result is returned.
        ray_address: as for `started`, which checks the folders on the nodes of that cluster; the memory of this machine
            counts without one.

    Raises:
        RecipeError: the recipe is refused; names all problems found.
    """
    loaded, problems = read_recipe(path, overrides, command)
    if loaded is None:
        raise RecipeError(problems)
    loaded = fetch_model(loaded, problems, progress)
    for problem in check_loaded(loaded):
        if problem.warning:
            progress.say(str(problem))
        else:
            problems.append(problem)
    problems += [loaded.problem(*violation) for violation in missing_trackers(loaded.recipe, command)]
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
    """Open and lock the run's folder, record config and provenance there, and log to it from now on.

    If a resumed run's settings differ from those of its newest attempt, they are printed.

    The options are those of `Opening`. With `resume=None` it waits for another process that uses the folder: the job's
    previous attempt may still be ending.

    Raises:
        ValueError: see `open_run_folder` and `versions_folder`; or another process uses the folder.
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
                progress.say(f"{earlier.path}: starting anew; the run there had no checkpoint and is now {aside}")
        if not resume and earlier.ended_early.is_file():
            progress.say(f"{earlier.path}: starting anew; the run there ended before its first step")
            overwrite = True
        attempted = yaml.safe_load(earlier.newest_config()) if resume and earlier.config.is_file() else None
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
        if attempted is not None:
            for change in changed_settings(attempted, resolved_dict(loaded)):
                progress.say(f"setting changed since the last attempt: {change}")
        folder.requeue.unlink(missing_ok=True)
        folder.ended_early.unlink(missing_ok=True)
        command = [loaded.environment.hide(argument) for argument in sys.argv]
        append_provenance(folder.provenance, collect_provenance(resolved_dict(loaded), loaded.provenance, command))
        log_to_file(folder.log_file("driver"), hide=loaded.environment.hide)
        with progress.noted_in(folder.now):
            yield folder


@contextmanager
def started(
    recipe: Recipe,
    folder: RunFolder,
    progress: Progress,
    *,
    with_engines: bool = False,
    with_teacher: bool = False,
    with_past: bool = False,
    with_critic: bool = False,
    may_restart: bool = False,
    total_updates: int | None = None,
    checkpoint: Path | None = None,
    files: Mapping[str, FileDigest] | None = None,
    ray_address: str | None = None,
) -> Iterator[Processes]:
    """Engines that answer and a trainer that has loaded its weights. `MemorySchedule` decides which of them has memory.

    Args:
        with_teacher: also start the engines of the recipe's teacher, if it has any.
        with_past: also start the engines of older versions, if the recipe has any.
        with_critic: also start the ranks of the recipe's critic, if it has one.
        may_restart: the trainer may be started anew, so keep nodes free as `trainer.spare_nodes` says, and check that
            there is room for checkpoints in memory.
        total_updates: optimizer updates of the run; None for a command without a trainer.
        checkpoint: the run's checkpoint that the trainer loads; None for the weights that the recipe names.
        files: digests of its files, with which the ranks compare them first.
        ray_address: HOST:PORT of the Ray cluster to run on; None for a private one on this machine.

    Raises:
        StageError: a process did not start, the cluster is too small, or nodes cannot write their folders.
    """
    counts = {
        "num_ranks": 0 if total_updates is None else recipe.trainer.num_ranks,
        "num_engines": recipe.rollout.num_engines if with_engines else 0,
        "num_teachers": recipe.teacher.engines_to_start if with_teacher else 0,
        "num_past": recipe.past_engines if with_past else 0,
        "num_critics": recipe.critic_ranks if with_critic else 0,
    }
    for name in clean_stale_segments():
        log.info("removed shared memory left by an earlier run: %s", name)
    with (
        ending_on_signals(partial(what_is_left, folder)) as take_over_signals,
        ExitStack() as shown,
        ExitStack() as ends,
    ):
        children = ChildProcesses()
        ends.callback(clean_stale_segments)
        ends.callback(folder.note_early_end)
        # When all processes have ended, none writes a checkpoint. Those of other nodes may end a moment later; the
        # next start removes what they write until then.
        ends.callback(CheckpointFolder(folder.checkpoints).clean)
        ends.callback(children.end)
        ends.callback(close_comparers)
        ends.callback(close_parsers)
        with progress.stage("starting Ray"):
            slots = most_slots(recipe, **counts)
            ends.enter_context(ray_cluster(ray_address, num_slots=slots))
            take_over_signals()
            places, spares = _reserved(recipe, counts, private=ray_address is None, may_restart=may_restart)
        processes = Processes(engines=None, trainers=None)
        try:
            with progress.stage("starting processes"):
                processes = start_processes(
                    recipe,
                    folder,
                    progress,
                    ends,
                    places,
                    total_updates=total_updates,
                    checkpoint=checkpoint,
                    files=files,
                    spares=spares,
                )
            log.info("process %d: driver", os.getpid())
            for role, pid in processes.roles:
                log.info("process %d: %s", pid, role)
            yield processes
            for group in (processes.trainers, processes.critics):
                if group is not None:
                    group.close()
        except ValueError as error:
            # The user's input has passed its checks, so this is a failure of the run.
            raise RunError(f"{type(error).__name__}: {error}") from error
        except RunError as error:
            for engines in (processes.engines, processes.teachers, processes.past):
                _raise_if_engine_ended(engines, error)
            if isinstance(error, TooManyFailed) and (limit := recipe.tracking.trajectories_per_step):
                write_failed(folder.failed_file, error.failed, limit)
                raise RunError(f"{error}\nconversations that failed: {folder.failed_file}") from error
            raise
        finally:
            children.note()
            shown.enter_context(progress.stage("ending processes"))


def _reserved(
    recipe: Recipe, counts: Mapping[str, int], *, private: bool, may_restart: bool
) -> tuple[Reservation, SpareNodes]:
    """Slots for so many ranks and engines of each kind, and the nodes that are kept free.

    Raises:
        StageError: see `started`.
    """
    nodes, resource = cluster_nodes(private=private)
    unit = f"{resource}s"
    driver = [node.node_id for node in nodes[:1]]
    nodes, kept = split_spares(nodes, recipe.trainer.spare_nodes if may_restart else 0)
    try:
        placement = place_what_fits(recipe, nodes, **counts, unit=unit)
    except StageError as error:
        free = ", ".join(node.name for node in kept)
        raise (StageError(f"{error}; trainer.spare_nodes keeps free: {free}") if kept else error) from None
    if kept:
        check_spares(kept, placement, unit, *driver)
    places = Reservation(placement, resource)
    if not private:
        check_nodes(recipe, places, kept)
        if may_restart:
            check_shared_memory(recipe, placement, kept)
    return places, SpareNodes(kept, resource)


def _raise_if_engine_ended(engines: EngineGroup | None, error: RunError) -> None:
    """Raises StageError with the engine's own error if `error` is due to an engine that ended."""
    if engines is None or not engines.addresses:
        return
    try:
        engines.check()
    except StageError as cause:
        log.error("because of it: %s", error)
        raise cause from error


def rollout_stage(loaded: LoadedRecipe, task: Task, processes: Processes, progress: Progress) -> RolloutStage:
    """A rollout stage on the engines of a run, with a client for the model's vocabulary and routing."""
    recipe, engines, teachers, past = loaded.recipe, processes.engines, processes.teachers, processes.past
    assert engines is not None
    config = read_hf_config(Path(recipe.model.path))
    shape = None
    if recipe.rollout.routed_experts:
        shape = (int(config["num_hidden_layers"]), int(config["num_experts_per_tok"]))
    vocab_size = int(config["vocab_size"])
    client = engines.client(vocab_size=vocab_size, routed_experts_shape=shape)

    if recipe.agent.sandbox.all_nodes:
        nodes, _ = cluster_nodes(private=False)
        if processes.spares is not None:
            nodes = [node for node in nodes if node.node_id not in {spare.node_id for spare in processes.spares.nodes}]
        task.sandbox.use(NodeSandboxes(recipe.agent.sandbox, nodes), len(nodes))

    def watch() -> None:
        for group in (engines, teachers, past):
            if group is not None:
                group.watch()

    player = None if past is None else _past(recipe, past, vocab_size)
    roles = {"engines": engines, "teacher": teachers, "older versions": past}

    def counts() -> dict[str, dict[str, float]]:
        of_roles: dict[str, dict[str, float]] = {
            role: group.counts for role, group in roles.items() if group is not None
        }
        return of_roles | ({"load": load} if (load := stage.pressure.load) else {})

    stage = RolloutStage(
        recipe,
        task,
        client,
        progress,
        watch=watch,
        flush_caches=engines.flush_caches,
        teacher=_teacher(recipe, teachers, vocab_size),
        past=player,
        workers=EpisodeWorkers(loaded, client, engines.logs, past=player) if recipe.agent.workers > 1 else None,
        scorer=client if isinstance(client, RoutedEngines) else None,
        engine_urls=lambda: [address.url for address in engines.receivers],
        engine_key=engines.key,
    )
    progress.engines = counts
    return stage


def _past(recipe: Recipe, past: EngineGroup, vocab_size: int) -> Engine:
    """The client of the engines of older versions."""
    if not recipe.deterministic:
        return past.client(vocab_size=vocab_size, routed_experts_shape=None)
    return OneByOne([SglangEngine(one.url, key=past.key, vocab_size=vocab_size) for one in past.addresses])


def _teacher(recipe: Recipe, teachers: EngineGroup | None, vocab_size: int) -> Teacher | None:
    """The teacher on the run's own engines or on servers of others; None without either."""
    settings = recipe.teacher
    urls = settings.urls if teachers is None else [address.url for address in teachers.addresses]
    key = key_of_others(settings) if teachers is None else teachers.key
    if not urls:
        return None
    return Teacher(
        [SglangEngine(url.rstrip("/"), key=key, vocab_size=vocab_size) for url in urls],
        # The last bits of a score depend on what else is in the batch.
        slots_per_engine=1 if recipe.deterministic else settings.max_concurrency_per_engine,
        timeout_s=settings.request_timeout_s,
        is_restarting=lambda: teachers is not None and teachers.is_restarting,
        restart_timeout_s=settings.startup_timeout_s,
    )


def logs_of_command(directory: str, command: str, loaded: LoadedRecipe) -> RunFolder:
    """The log folder of a command other than a training run: `<directory>/<command>-<time>/logs`."""
    folder = RunFolder(Path(directory) / f"{command}-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}")
    folder.logs.mkdir(parents=True)
    log_to_file(folder.log_file("driver"), hide=loaded.environment.hide)
    return folder
