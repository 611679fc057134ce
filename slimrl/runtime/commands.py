"""What each command of the CLI does, with its arguments as plain values."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from slimrl.algorithms.shaping import shape_rewards
from slimrl.base.output_file import check_output_file
from slimrl.base.spans import PROFILED, RECORDING
from slimrl.config.load import LoadedRecipe
from slimrl.config.schema.run import TrackingConfig
from slimrl.config.show import resolved_dict
from slimrl.data.conversation_lines import write_conversations
from slimrl.data.trajectory import Status, read_trajectories, write_trajectories
from slimrl.models.hf_config import read_hf_config
from slimrl.observability.profiling.recorder import Profiled, Recorder, check_profiled
from slimrl.observability.profiling.span_sender import SpanSender
from slimrl.observability.progress import Progress
from slimrl.observability.run_folder import Opening, RunFolder
from slimrl.observability.trackers import Trackers
from slimrl.rollout.group_filters import GroupFilters
from slimrl.rollout.task.task import Task, load_task
from slimrl.runtime.checks.checkpoint_check import check_exported
from slimrl.runtime.checks.memory_check import copies_here
from slimrl.runtime.checks.start_check import check_checkpoint_model
from slimrl.runtime.learner import Learner
from slimrl.runtime.left_out import LeftOut
from slimrl.runtime.loop import train_on_file as train_on_file_loop
from slimrl.runtime.memory_folder import MemoryFolder
from slimrl.runtime.preemption import Preemption, preemption_by_signal, raise_preempted
from slimrl.runtime.run import Run
from slimrl.runtime.sft import read_examples
from slimrl.runtime.start import logs_of_command, open_run, prepare, rollout_stage, started
from slimrl.runtime.state import CheckpointFolder, RunState, read_state
from slimrl.runtime.trainer_restarts import TrainerRestarts
from slimrl.runtime.training import Training, kept_step, newest_state, sampler

log = logging.getLogger(__name__)


def train(
    path: Path,
    overrides: Sequence[str],
    *,
    ray_address: str | None,
    profiled: Profiled | None = None,
    **how: Unpack[Opening],
) -> None:
    """`slimrl train`: rollout and training until the recipe's number of steps.

    Args:
        ray_address: see `started`, here and in the other commands.
        profiled: what to record of the run.

    Raises:
        Preempted: the run was preempted before its last step.
    """
    with Progress(0) as progress:
        read = partial(load_task, train=True, evaluate=True)
        loaded, task = prepare(path, overrides, "train", progress, read, ray_address=ray_address)
        updates = loaded.recipe.steps * loaded.recipe.trainer.updates_per_rollout
        _say_all(task.notes, progress)
        _train(
            loaded,
            progress,
            task.train,
            task,
            total_updates=updates,
            ray_address=ray_address,
            profiled=profiled,
            **how,
        )


def sft(
    path: Path,
    overrides: Sequence[str],
    *,
    ray_address: str | None,
    profiled: Profiled | None = None,
    **how: Unpack[Opening],
) -> None:
    """`slimrl sft`: supervised training on conversations; raises as `train`."""
    with Progress(0) as progress:
        loaded, examples = prepare(path, overrides, "sft", progress, read_examples, ray_address=ray_address)
        updates = loaded.recipe.steps
        _train(
            loaded,
            progress,
            examples,
            None,
            total_updates=updates,
            ray_address=ray_address,
            profiled=profiled,
            **how,
        )


def _train(
    loaded: LoadedRecipe,
    progress: Progress,
    items: Mapping[str, Sequence[Any]],
    task: Task | None,
    *,
    total_updates: int,
    ray_address: str | None,
    profiled: Profiled | None,
    **how: Unpack[Opening],
) -> None:
    """Open the run, continue from its newest checkpoint, and train on `items`: conversations, or a task's prompts,
    by the name of their file."""
    recipe, learns = loaded.recipe, task is not None
    check_profiled(profiled, recipe.steps)
    progress.total_steps = recipe.steps
    with open_run(loaded, progress, **how) as folder:
        for note in () if task is None else task.notes:
            log.info(note)
        left_out = LeftOut(folder.left_out, partial(sampler, items, recipe, RunState()))
        left_out.remove_ended_row(CheckpointFolder(folder.checkpoints))
        # On a cluster the ranks read the files together, which takes this process alone far longer.
        by_ranks = ray_address is not None
        checkpoint, state = newest_state(folder, recipe, progress, learns=learns, contents=not by_ranks)
        files = read_state(checkpoint)[1] if checkpoint is not None and by_ranks else None
        # Refuses a position in other data, before anything starts.
        sampler(items, recipe, state, left_out.items)
        with (
            _recorder(folder, profiled, recipe.tracking, progress) as recorder,
            preemption_by_signal(recipe.checkpoint.grace_s) as preemption,
            _trackers(loaded, folder, checkpoint, state, progress) as trackers,
            _memory_folder(loaded, progress, on_one_node=ray_address is None) as memory,
            started(
                recipe,
                folder,
                progress,
                with_engines=learns,
                with_teacher=learns,
                with_past=learns,
                with_critic=learns,
                may_restart=True,
                total_updates=total_updates,
                checkpoint=checkpoint,
                files=files,
                ray_address=ray_address,
            ) as processes,
        ):
            training = Training(
                recipe, folder, items, task, processes, trackers, progress,
                preemption=preemption, recorder=recorder, memory=memory, left_out=left_out,
            )  # fmt: skip
            restarts = TrainerRestarts(
                recipe.run, training.rewind, progress, left_out=left_out, rewinds=recipe.stop.rewind_not_finite
            )
            try:
                with nullcontext() if task is None else rollout_stage(loaded, task, processes, progress) as stage:
                    state = restarts.go_on(partial(training.begin, stage), checkpoint, state)
            finally:
                if memory is not None:
                    memory.nodes.remove()
        raise_preempted(folder, state.step, recipe.steps)


def train_on_file(
    path: Path,
    overrides: Sequence[str],
    *,
    trajectories: Path,
    steps: int,
    overwrite: bool,
    ray_address: str | None,
    profiled: Profiled | None = None,
) -> None:
    """`slimrl train --trajectories`: every step trains on the same trajectories; no engine runs.

    Raises:
        ValueError: the file is missing, holds no trajectories, or has broken lines.
    """
    with Progress(steps) as progress:
        read = partial(load_task, train=False, evaluate=False)
        loaded, task = prepare(
            path, [*overrides, f"steps={steps}"], "train --trajectories", progress, read, ray_address=ray_address
        )
        check_profiled(profiled, steps)
        recipe = loaded.recipe
        vocab_size = int(read_hf_config(Path(recipe.model.path))["vocab_size"])
        batch = read_trajectories(trajectories, vocab_size)
        usable = [segment for t in batch if t.status is not Status.failed for segment in t.segments]
        if recipe.algorithm.teacher_coef and any(segment.teacher_logprobs is None for segment in usable):
            raise ValueError(
                f"{trajectories}: algorithm.teacher_coef needs the log-probs of a teacher, and some trajectories have "
                "none. Sample them with a teacher, or use 0."
            )
        shape_rewards(batch, recipe.algorithm)
        updates, state = steps * recipe.trainer.updates_per_rollout, RunState()
        with (
            open_run(loaded, progress, overwrite=overwrite) as folder,
            _recorder(folder, profiled, recipe.tracking, progress) as recorder,
            _trackers(loaded, folder, None, state, progress) as trackers,
            started(
                recipe, folder, progress, with_critic=True, total_updates=updates, ray_address=ray_address
            ) as processes,
        ):
            assert processes.trainers is not None
            run = Run(
                recipe=recipe,
                folder=folder,
                trainers=processes.trainers,
                trackers=trackers,
                progress=progress,
                state=state,
                preemption=Preemption(0.0),
                data=None,
                recorder=recorder,
            )
            learner = Learner(recipe, processes.trainers, state, processes.critics, say=progress.say, folder=folder)
            train_on_file_loop(run, learner, batch, GroupFilters(recipe.reward.group_filters, task.group_filters))


def rollout(
    path: Path,
    overrides: Sequence[str],
    *,
    out: Path,
    conversations: Path | None,
    min_reward: float,
    ray_address: str | None,
) -> None:
    """`slimrl rollout`: one step's trajectories into a file; no trainer runs.

    Args:
        conversations: file for those of at least `min_reward`.
    """
    for option, file in (("--out", out), ("--conversations", conversations)):
        if file is not None:
            if file.exists():
                raise ValueError(f"{file} exists; remove it or give another {option}.")
            check_output_file(option, file)
    with Progress(1) as progress:
        read = partial(load_task, train=True, evaluate=False)
        loaded, task = prepare(path, overrides, "rollout", progress, read, ray_address=ray_address)
        recipe = loaded.recipe
        _say_all(task.notes, progress)
        prompts = sampler(task.train, recipe, RunState()).take(recipe.rollout.prompts_per_step)
        folder = logs_of_command(recipe.run.dir, "rollout", loaded)
        with (
            started(
                recipe,
                folder,
                progress,
                with_engines=True,
                with_teacher=True,
                with_past=True,
                ray_address=ray_address,
            ) as processes,
            rollout_stage(loaded, task, processes, progress) as stage,
        ):
            trajectories = stage.rollout(prompts, label="step_000001")
        write_trajectories(out, trajectories)
        progress.say(f"{len(trajectories)} trajectories: {out}")
        if conversations is not None:
            count = write_conversations(conversations, trajectories, min_reward)
            progress.say(f"{count} conversations with a reward of at least {min_reward:g}: {conversations}")


def export(path: Path, overrides: Sequence[str], *, checkpoint: Path, out: Path, ray_address: str | None) -> None:
    """`slimrl export`: a training checkpoint as a Hugging Face checkpoint, under the recipe's layout."""
    if out.exists():
        raise ValueError(f"{out} exists; an export never overwrites.")
    if not (checkpoint / "trainer").is_dir():
        raise ValueError(f"--checkpoint {checkpoint}: not a checkpoint of a run, which holds a folder `trainer`.")
    with Progress(1) as progress:
        loaded, _ = prepare(path, overrides, "export", progress, lambda _: None, ray_address=ray_address)
        recipe = loaded.recipe
        with progress.stage("checking the checkpoint"), progress.phase("checksums", 0, "files") as phase:
            check_exported(checkpoint, phase.update)
        check_checkpoint_model(checkpoint, recipe)
        updates = recipe.steps * recipe.trainer.updates_per_rollout
        folder = logs_of_command(recipe.run.dir, "export", loaded)
        with started(
            recipe, folder, progress, total_updates=updates, checkpoint=checkpoint, ray_address=ray_address
        ) as processes:
            assert processes.trainers is not None
            processes.trainers.export_hf(out)
        progress.say(f"model: {out}")


def _say_all(notes: Sequence[str], progress: Progress) -> None:
    for note in notes:
        progress.say(note)


def _memory_folder(
    loaded: LoadedRecipe, progress: Progress, *, on_one_node: bool
) -> AbstractContextManager[MemoryFolder | None]:
    if not loaded.recipe.checkpoint.in_memory_every_steps:
        return nullcontext()
    # Two are there at a time. Of several nodes some may take less than others.
    needed = copies_here(loaded) // 2 if on_one_node else 0
    return MemoryFolder(progress.say, loaded.recipe.trainer.timeout_s, needed)


@contextmanager
def _recorder(
    folder: RunFolder, profiled: Profiled | None, tracking: TrackingConfig, progress: Progress
) -> Iterator[Recorder | None]:
    """Record spans of the run's processes, which start and end within the block, send them where the recipe asks for
    it, and write the profile's trace at the end."""
    # They are of an earlier attempt; the second is left if that was killed while it recorded.
    for sign in (PROFILED, RECORDING):
        (folder.profile / sign).unlink(missing_ok=True)
    if profiled is None and not tracking.opentelemetry:
        yield None
        return
    sender = None
    if tracking.opentelemetry:
        sender = SpanSender(tracking.opentelemetry, folder.path.name, folder.span_report, progress.say)
    recorder = Recorder(folder.profile, profiled, sender)
    try:
        yield recorder
    finally:
        if (trace := recorder.finish()) is not None:
            progress.say(f"trace: {trace}")


def _trackers(
    loaded: LoadedRecipe, folder: RunFolder, checkpoint: Path | None, state: RunState, progress: Progress
) -> Trackers:
    """Trackers that continue after the checkpoint's step, or start empty."""
    keep = kept_step(checkpoint, state)
    return Trackers(folder, loaded.recipe.tracking, resolved_dict(loaded), keep_through_step=keep, say=progress.say)
