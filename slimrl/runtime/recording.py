"""What a run records of its steps and evaluations: whole groups of trajectories with their tokens."""

from collections.abc import Callable, Iterable, Sequence

from slimrl.config.schema.run import TrackingConfig
from slimrl.data.prompt import Prompt
from slimrl.data.token_values import TokenValues
from slimrl.data.trajectory import Trajectory
from slimrl.observability.record_writer import RecordWriter
from slimrl.observability.recorded_trajectories import Recorded, whole_groups
from slimrl.observability.run_folder import RunFolder
from slimrl.rollout.step_rollout import StepRollout
from slimrl.rollout.task.task import Task
from slimrl.runtime.step_metrics import Step


class Recording:
    """What cannot be written is said, and then nothing more is recorded: the run goes on."""

    def __init__(
        self, settings: TrackingConfig, folder: RunFolder, task: Task, step: int, say: Callable[[str], None]
    ) -> None:
        """
        Args:
            step: at which the run continues; 0 for a new one.
            say: shows the user a line.
        """
        self._limit, self._folder, self._say = settings.recorded_trajectories_per_step, folder, say
        self.sources = {prompt.prompt_id: name for name, prompts in task.train.items() for prompt in prompts}
        """Names of the training files by the ids of their prompts"""
        self._writer = RecordWriter(
            folder.trajectories,
            lambda tokens: task.dialogues.chat.template.decode(tokens),
            most_bytes=settings.recorded_bytes,
            keep_through_step=step,
            say=say,
        )
        self._chosen: Recorded | None = None
        """The trajectories of the present step"""

    def choose(self, step: Step, batch: StepRollout) -> None:
        """Choose the trajectories of a step, before its updates."""
        if self._limit == 0:
            return
        selection = batch.selection
        step.tokens = TokenValues(whole_groups(batch.sampled, self._limit))
        groups = {trajectory.group_id for trajectory in step.tokens.trajectories}
        self._chosen = Recorded(
            step=step.number,
            values=step.tokens,
            sources=self.sources,
            labels={group: batch.prompts[group].label for group in groups},
            advantages={
                trajectory.trajectory_id: float(advantage)
                for trajectory, advantage in zip(selection.trajectories, selection.advantages, strict=True)
            },
        )

    def write_step(self) -> None:
        """Begin to write the step's trajectories, after its updates."""
        chosen, self._chosen = self._chosen, None
        if chosen is not None:
            self._try(lambda: self._writer.write(self._folder.recorded_file(chosen.step), chosen))

    def write_evaluation(
        self, step: int, name: str, prompts: Sequence[Prompt], trajectories: Iterable[Trajectory]
    ) -> None:
        """Begin to write trajectories of an evaluation set.

        Args:
            trajectories: of the whole set in any order; their ids are in that of prompts and samples.
        """
        if self._limit == 0:
            return
        ordered = sorted(trajectories, key=lambda trajectory: trajectory.trajectory_id)
        recorded = Recorded(
            step=step,
            values=TokenValues(whole_groups(ordered, self._limit)),
            sources=dict.fromkeys((prompt.prompt_id for prompt in prompts), name),
            labels={prompt.prompt_id: prompt.label for prompt in prompts},
            advantages={},
        )
        self._try(lambda: self._writer.write(self._folder.eval_recorded_file(step, name), recorded))

    def finish(self) -> None:
        """Wait until all is written."""
        self._try(self._writer.flush)

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            self._limit = 0
            self._say(f"trajectories are recorded no more: {error}")
