"""A run's training from one of its checkpoints on, and the way back to one."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, cast

from slimrl.config.schema.recipe import Recipe
from slimrl.data.curriculum import Curriculum
from slimrl.data.mixture import DataOrder, Mixture
from slimrl.data.prompt import Prompt
from slimrl.data.prompts import Sampler
from slimrl.observability.profiling.recorder import Recorder
from slimrl.observability.progress import Progress
from slimrl.observability.run_folder import RunFolder
from slimrl.observability.trackers import Trackers
from slimrl.rollout.stage import RolloutStage
from slimrl.rollout.task.task import Task
from slimrl.runtime.checks.start_check import check_critic, resume_point
from slimrl.runtime.cluster.processes import Processes
from slimrl.runtime.left_out import LeftOut
from slimrl.runtime.loop import train, train_on_conversations
from slimrl.runtime.memory_folder import MemoryFolder, newest_copy
from slimrl.runtime.preemption import Preemption
from slimrl.runtime.run import Run
from slimrl.runtime.sft import Example
from slimrl.runtime.state import CheckpointFolder, RunState
from slimrl.runtime.train_run import TrainRun

BEFORE_STEP_0 = -1
"""Keeps no line of metrics: for an interrupted run without a checkpoint."""


class Training:
    """What stays while a run's trainer may be started anew."""

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        items: Mapping[str, Sequence[Any]],
        task: Task | None,
        processes: Processes,
        trackers: Trackers,
        progress: Progress,
        *,
        preemption: Preemption,
        recorder: Recorder | None,
        memory: MemoryFolder | None,
        left_out: LeftOut,
    ) -> None:
        """
        Args:
            items: conversations, or a task's prompts, by the name of their file.
            task: None for supervised training.
            memory: the folder of its checkpoints in memory, if it has any.
        """
        self._recipe, self._folder, self._items, self._task = recipe, folder, items, task
        self._processes, self._trackers, self._progress = processes, trackers, progress
        self._preemption, self._recorder, self._memory = preemption, recorder, memory
        self._left_out = left_out

    def begin(
        self, stage: RolloutStage | None, checkpoint: Path | None, state: RunState
    ) -> tuple[Run, Callable[[], None]]:
        """A run from a checkpoint on, and its loop.

        Args:
            stage: None for supervised training.
        """
        processes, recipe = self._processes, self._recipe
        assert processes.trainers is not None
        data = sampler(self._items, recipe, state, self._left_out.items)
        if self._task is None or stage is None:
            run = Run(
                recipe=recipe,
                folder=self._folder,
                trainers=processes.trainers,
                trackers=self._trackers,
                progress=self._progress,
                state=state,
                preemption=self._preemption,
                data=data,
                recorder=self._recorder,
                memory_folder=self._memory,
                summary_every_steps=recipe.sft.summary_every_steps,
            )
            return run, partial(train_on_conversations, run, data)
        assert processes.engines is not None
        train_run = TrainRun(
            recipe=recipe,
            folder=self._folder,
            task=self._task,
            trainers=processes.trainers,
            critics=processes.critics,
            engines=processes.engines,
            past_engines=processes.past,
            stage=stage,
            checkpoint=checkpoint,
            left_out=self._left_out.items,
            trackers=self._trackers,
            progress=self._progress,
            state=state,
            data=data,
            recorder=self._recorder,
            memory_folder=self._memory,
            preemption=self._preemption,
        )
        return train_run, partial(self._train, train_run)

    def _train(self, run: TrainRun) -> None:
        with self._trackers.showing(run.live_metrics()):
            train(run)

    def rewind(self) -> tuple[Path | None, RunState]:
        """Go back to the newest checkpoint, or to the copy in memory if that is newer. Its files are not read here: the
        ranks compare them."""
        folder, memory = self._folder, self._memory
        self._left_out.remove_ended_row(CheckpointFolder(folder.checkpoints), memory)
        found = newest_copy(memory, folder, self._progress.say) or newest_state(
            folder, self._recipe, self._progress, contents=False
        )
        if found[0] is None:
            self._progress.say("there is no checkpoint and no copy in memory: the run begins again")
        if memory is not None:
            memory.forget_after(found[1].step)
        self._trackers.rewind(kept_step(*found))
        return found


def newest_state(
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


def kept_step(checkpoint: Path | None, state: RunState) -> int:
    """The last step of which a run that goes on from a checkpoint keeps the metrics."""
    return BEFORE_STEP_0 if checkpoint is None else state.step


def sampler[T: Prompt | Example](
    files: Mapping[str, Sequence[T]], recipe: Recipe, state: RunState, left_out: Collection[str] = ()
) -> DataOrder[T]:
    """Samples the training data in the order of the seed, starting at the position in `state`.

    Args:
        files: their items, by name.
        left_out: items that are skipped, see LeftOut.

    Raises:
        ValueError: the position is in other files, or in one with another number of lines; or nothing is left of one.
    """
    order: DataOrder[T]
    if recipe.data.curriculum.levels:
        prompts = cast(Mapping[str, Sequence[Prompt]], files)
        curriculum = Curriculum(
            prompts, recipe.data.weights, recipe.data.curriculum,
            pass_reward=recipe.eval.pass_reward, seed=recipe.seed, shuffle=recipe.data.shuffle,
        )  # fmt: skip
        order = cast(DataOrder[T], curriculum)
    elif recipe.data.weights:
        order = Mixture(files, recipe.data.weights, seed=recipe.seed, shuffle=recipe.data.shuffle)
    else:
        order = Sampler([*chain(*files.values())], seed=recipe.seed, shuffle=recipe.data.shuffle)
    try:
        if left_out:
            order.leave_out(lambda item: (item.prompt_id if isinstance(item, Prompt) else item.source) in left_out)
        if state.cursor:
            order.restore(state.cursor)
    except ValueError as error:
        paths = ", ".join(recipe.data.train_files.values())
        raise ValueError(f"data.train = {paths}: {error}") from error
    return order
