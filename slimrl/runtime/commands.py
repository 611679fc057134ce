"""What each command of the CLI does, with its arguments as plain values."""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Unpack, cast

from slimrl.algorithms.shaping import shape_rewards
from slimrl.base.output_file import check_output_file
from slimrl.base.spans import PROFILED, RECORDING
from slimrl.config.load import LoadedRecipe
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.run import TrackingConfig
from slimrl.config.show import resolved_dict
from slimrl.data.conversation_lines import write_conversations
from slimrl.data.curriculum import Curriculum
from slimrl.data.mixture import DataOrder, Mixture
from slimrl.data.prompt import Prompt
from slimrl.data.prompts import Sampler
from slimrl.data.trajectory import Status, read_trajectories, write_trajectories
from slimrl.models.hf_config import read_hf_config
from slimrl.observability.profiling.recorder import Profiled, Recorder, check_profiled
from slimrl.observability.profiling.span_sender import SpanSender
from slimrl.observability.progress import Progress
from slimrl.observability.run_folder import Opening, RunFolder
from slimrl.observability.trackers import Trackers
from slimrl.rollout.group_filters import GroupFilters
from slimrl.rollout.stage import RolloutStage
from slimrl.rollout.task.task import Task, load_task
from slimrl.runtime.checks.checkpoint_check import check_exported
from slimrl.runtime.checks.start_check import check_checkpoint_model, check_critic, resume_point
from slimrl.runtime.learner import Learner
from slimrl.runtime.left_out import LeftOut
from slimrl.runtime.loop import train as train_loop
from slimrl.runtime.loop import train_on_conversations as sft_loop
from slimrl.runtime.loop import train_on_file as train_on_file_loop
from slimrl.runtime.memory_folder import MemoryFolder, newest_copy
from slimrl.runtime.preemption import Preemption, preemption_by_signal, raise_preempted
from slimrl.runtime.run import Run
from slimrl.runtime.sft import Example, read_examples
from slimrl.runtime.start import logs_of_command, open_run, prepare, rollout_stage, started
from slimrl.runtime.state import CheckpointFolder, RunState
from slimrl.runtime.train_run import TrainRun
from slimrl.runtime.trainer_restarts import TrainerRestarts

log = logging.getLogger(__name__)

BEFORE_STEP_0 = -1
"""Keeps no line of metrics: for an interrupted run without a checkpoint."""


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
    recipe = loaded.recipe
    check_profiled(profiled, recipe.steps)
    progress.total_steps = recipe.steps
    with open_run(loaded, progress, **how) as folder:
        for note in () if task is None else task.notes:
            log.info(note)
        checkpoints = CheckpointFolder(folder.checkpoints)
        left_out = LeftOut(folder.left_out, partial(_sampler, items, recipe, RunState()))
        left_out.remove_ended_row(checkpoints)
        checkpoint, state = _resume_point(folder, recipe, progress, learns=task is not None)
        # Refuses a position in other data, before anything starts.
        _sampler(items, recipe, state, left_out.items)
        with (
            _recorder(folder, profiled, recipe.tracking, progress) as recorder,
            preemption_by_signal(recipe.checkpoint.grace_s) as preemption,
            _trackers(loaded, folder, checkpoint, state, progress) as trackers,
            _memory_folder(recipe, progress) as memory,
            started(
                recipe,
                folder,
                progress,
                with_engines=task is not None,
                with_teacher=task is not None,
                with_past=task is not None,
                with_critic=task is not None,
                with_spares=True,
                total_updates=total_updates,
                checkpoint=checkpoint,
                ray_address=ray_address,
            ) as processes,
        ):
            assert processes.trainers is not None
            trainers = processes.trainers

            def begin(
                stage: RolloutStage | None, checkpoint: Path | None, state: RunState
            ) -> tuple[Run, Callable[[], None]]:
                """A run from a checkpoint on, and its loop."""
                data = _sampler(items, recipe, state, left_out.items)
                if task is None or stage is None:
                    run = Run(
                        recipe=recipe,
                        folder=folder,
                        trainers=trainers,
                        trackers=trackers,
                        progress=progress,
                        state=state,
                        preemption=preemption,
                        data=data,
                        recorder=recorder,
                        memory_folder=memory,
                        summary_every_steps=recipe.sft.summary_every_steps,
                    )
                    return run, partial(sft_loop, run, data)
                assert processes.engines is not None
                train_run = TrainRun(
                    recipe=recipe,
                    folder=folder,
                    task=task,
                    trainers=trainers,
                    critics=processes.critics,
                    engines=processes.engines,
                    past_engines=processes.past,
                    stage=stage,
                    checkpoint=checkpoint,
                    left_out=left_out.items,
                    trackers=trackers,
                    progress=progress,
                    state=state,
                    data=data,
                    recorder=recorder,
                    memory_folder=memory,
                    preemption=preemption,
                )

                def loop() -> None:
                    with trackers.showing(train_run.live_metrics()):
                        train_loop(train_run)

                return train_run, loop

            def rewind() -> tuple[Path | None, RunState]:
                """Go back to the newest checkpoint, or to the copy in memory if that is newer."""
                left_out.remove_ended_row(checkpoints, memory)
                found = newest_copy(memory, folder, progress.say) or _resume_point(
                    folder, recipe, progress, contents=False
                )
                if memory is not None:
                    memory.forget_after(found[1].step)
                trackers.rewind(_kept_step(*found))
                return found

            restarts = TrainerRestarts(
                recipe.run, rewind, progress, left_out=left_out, rewinds=recipe.stop.rewind_not_finite
            )
            with nullcontext() if task is None else rollout_stage(loaded, task, processes, progress) as stage:
                state = restarts.go_on(partial(begin, stage), checkpoint, state)
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
        prompts = _sampler(task.train, recipe, RunState()).take(recipe.rollout.prompts_per_step)
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


def _resume_point(
    folder: RunFolder, recipe: Recipe, progress: Progress, *, learns: bool = False, contents: bool = True
) -> tuple[Path | None, RunState]:
    """The newest checkpoint and its state; None and a new state if there is no checkpoint.

    Args:
        contents: as for `check_checkpoint`. False where the ranks read all files for their checksums.
        learns: the run is one of reinforcement learning, which may have a critic.

    Raises:
        ValueError: see `resume_point` and `check_critic`.
    """
    found = None
    if folder.has_checkpoint:
        with progress.stage("checking the checkpoint"), progress.phase("checksums", 0, "files") as phase:
            found = resume_point(folder, recipe, contents=contents, seen=phase.update)
            if found is not None and learns:
                check_critic(found.path, recipe)
    folder.note_checkpoint(None if found is None else found.state.step)
    if found is None:
        return None, RunState()
    if not found.has_checksums:
        progress.say(f"{found.path} has no checksums: its files are not checked")
    progress.say(f"continuing after step {found.state.step} of {recipe.steps}, from {found.path}")
    return found.path, found.state


def _sampler[T: Prompt | Example](
    files: Mapping[str, Sequence[T]], recipe: Recipe, state: RunState, left_out: Collection[str] = ()
) -> DataOrder[T]:
    """Samples the training data in the order of the seed, starting at the position in `state`.

    Args:
        files: their items, by name.
        left_out: items that are skipped, see LeftOut.

    Raises:
        ValueError: the position is in other files, or in one with another number of lines; or nothing is left of one.
    """
    sampler: DataOrder[T]
    if recipe.data.curriculum.levels:
        prompts = cast(Mapping[str, Sequence[Prompt]], files)
        curriculum = Curriculum(
            prompts, recipe.data.weights, recipe.data.curriculum,
            pass_reward=recipe.eval.pass_reward, seed=recipe.seed, shuffle=recipe.data.shuffle,
        )  # fmt: skip
        sampler = cast(DataOrder[T], curriculum)
    elif recipe.data.weights:
        sampler = Mixture(files, recipe.data.weights, seed=recipe.seed, shuffle=recipe.data.shuffle)
    else:
        sampler = Sampler([*chain(*files.values())], seed=recipe.seed, shuffle=recipe.data.shuffle)
    try:
        if left_out:
            sampler.leave_out(lambda item: (item.prompt_id if isinstance(item, Prompt) else item.source) in left_out)
        if state.cursor:
            sampler.restore(state.cursor)
    except ValueError as error:
        paths = ", ".join(recipe.data.train_files.values())
        raise ValueError(f"data.train = {paths}: {error}") from error
    return sampler


def _memory_folder(recipe: Recipe, progress: Progress) -> AbstractContextManager[MemoryFolder | None]:
    if not recipe.checkpoint.in_memory_every_steps:
        return nullcontext()
    return MemoryFolder(progress.say, recipe.trainer.timeout_s)


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
    keep = _kept_step(checkpoint, state)
    return Trackers(folder, loaded.recipe.tracking, resolved_dict(loaded), keep_through_step=keep, say=progress.say)


def _kept_step(checkpoint: Path | None, state: RunState) -> int:
    """The last step of which a run that goes on from a checkpoint keeps the metrics."""
    return BEFORE_STEP_0 if checkpoint is None else state.step
