"""Everything that a run of `slimrl train` holds, and the parts of a step that need the engines."""

from collections.abc import Iterator
from contextlib import contextmanager

from slimrl.config.schema import Recipe
from slimrl.data.prompts import Sampler
from slimrl.data.trajectory import Prompt, Trajectory
from slimrl.observability.metrics import read_metrics
from slimrl.observability.progress import Progress
from slimrl.observability.report import write_curve
from slimrl.observability.run_folder import RunFolder
from slimrl.observability.samples import write_samples
from slimrl.observability.trackers import Trackers
from slimrl.rollout.statistics import rollout_metrics
from slimrl.runtime.batch import apply_truncation_rule
from slimrl.runtime.engine_group import EngineGroup
from slimrl.runtime.errors import StepDropped
from slimrl.runtime.hand_over import HandOver, Stage
from slimrl.runtime.learner import Learner
from slimrl.runtime.preemption import Preemption
from slimrl.runtime.rollout_stage import RolloutStage
from slimrl.runtime.state import CheckpointFolder, RunState
from slimrl.runtime.step import Step
from slimrl.runtime.task import Task
from slimrl.runtime.trainer_group import TrainerGroup
from slimrl.runtime.weight_sync import WeightSync


class TrainRun:
    """A started run: the engines answer, the trainer has the weights of `state`."""

    def __init__(
        self,
        *,
        recipe: Recipe,
        folder: RunFolder,
        task: Task,
        trainers: TrainerGroup,
        engines: EngineGroup,
        stage: RolloutStage,
        trackers: Trackers,
        progress: Progress,
        state: RunState,
        prompts: Sampler[Prompt],
        preemption: Preemption,
    ) -> None:
        self.recipe, self.state = recipe, state
        self.learner = Learner(recipe, trainers, state, task.group_filters)
        self._folder, self._task = folder, task
        self._trainers, self._stage = trainers, stage
        self._memory = HandOver(engines, trainers, enabled=recipe.rollout.colocated)
        self._weights = WeightSync(recipe, state, trainers, engines, self._memory, progress)
        self._trackers, self._progress = trackers, progress
        self._prompts, self._preemption = prompts, preemption
        self._checkpoints = CheckpointFolder(folder.checkpoints)

    def meet_engines(self) -> None:
        """Give the engines the trainer's weights, and make the evaluation that comes before the next step.

        A fresh run evaluates what it starts from, as step 0; a resumed one what ended before its evaluation did.
        """
        self._weights.connect()
        start = Step(0)
        self._send_weights(start)
        if self.state.step == 0:
            start.close()
            self._write_or_keep(start)
        elif self.state.unwritten and not self._is_written(self.state.step):
            self._write_or_keep(Step(self.state.step, self.state.unwritten))
        else:
            self.state.unwritten = {}
        if self.evaluation_is_due():
            self.evaluate()

    @property
    def goes_on(self) -> bool:
        """Whether there is another step to make, and time for it."""
        return self.state.step < self.recipe.steps and not self._preemption.asked

    @contextmanager
    def next_step(self) -> Iterator[Step]:
        """A step that counts when it is complete; not so a dropped one.

        Its metrics are written then, or after its evaluation if it has one.
        """
        step = Step(self.state.step + 1)
        try:
            yield step
        except StepDropped:
            self._progress.say(f"step {step.number} dropped: its rollout went on past checkpoint.grace_s")
            return
        step.close()
        self.state.step = step.number
        self.state.cursor = self._prompts.state()
        self._write_or_keep(step)

    def rollout(self, step: Step) -> list[Trajectory]:
        """Scored trajectories of the next prompts.

        Raises:
            RunError: too many trajectories failed.
            StepDropped: the run has to make room at once.
        """
        prompts = self._prompts.take(self.recipe.rollout.prompts_per_step)
        batch = self._stage.rollout(prompts, label=f"step_{step.number:06d}", may_go_on=self._preemption.check)
        apply_truncation_rule(batch.trajectories, self.recipe.algorithm.truncated)
        step.record(rollout_metrics(batch.trajectories, batch.seconds))
        write_samples(
            self._folder.sample_file(step.number), batch.trajectories, self.recipe.tracking.trajectories_per_step
        )
        self._memory.enter(Stage.train)
        return batch.trajectories

    def resync(self, step: Step) -> None:
        """Send the weights as the next version."""
        self.state.weight_version += 1
        self._send_weights(step)

    def evaluation_is_due(self) -> bool:
        return bool(self.state.unwritten)

    def evaluate(self) -> None:
        """Accuracy on every evaluation set, which completes the metrics of the last step.

        Raises:
            RunError: too many trajectories failed.
        """
        step = Step(self.state.step, self.state.unwritten)
        with step.timed("eval"):
            for name, prompts in self._task.eval_sets.items():
                result, _ = self._stage.evaluate(name, prompts, label=f"eval_{step.number:06d}")
                step.record({f"eval/{name}/accuracy": result.accuracy})
        self._write(step)

    def checkpoint_is_due(self) -> bool:
        """At the last step, every so many, and before the run makes room; never of what is saved already."""
        step, every = self.state.step, self.recipe.checkpoint.every_steps
        if step == 0 or self._checkpoints.holds(step):
            return False
        return step == self.recipe.steps or self._preemption.asked or (every > 0 and step % every == 0)

    def save_checkpoint(self) -> None:
        """Write what a resume needs; the folder appears under its name when it is whole."""
        self._memory.enter(Stage.save)
        self._checkpoints.save(self.state, self.recipe.checkpoint.keep, self._trainers.save_checkpoint)
        self._folder.note_checkpoint(self.state.step)
        self._memory.enter(Stage.rollout)

    def finish(self) -> None:
        """The curve and the model as a Hugging Face checkpoint; neither for a run that makes room before its end.

        The model comes last: where it is, the run is complete, and is not resumed.
        """
        if self.checkpoint_is_due():
            # It was asked to make room in an evaluation.
            self.save_checkpoint()
        if self.state.step < self.recipe.steps:
            return
        write_curve([self._folder.metrics], self._folder.curve, title=self.recipe.run.name)
        self._memory.enter(Stage.exchange)
        self._trainers.export_hf(self._folder.fresh_export())
        self._progress.say(f"model: {self._folder.export}")
        self._progress.say(f"curve: {self._folder.curve}")

    def _send_weights(self, step: Step) -> None:
        self._weights.send(step)
        self._memory.enter(Stage.rollout)

    def _has_evaluation(self, step: int) -> bool:
        settings = self.recipe.eval
        if not self._task.eval_sets:
            return False
        if step == 0:
            return settings.at_start
        if step == self.recipe.steps and settings.at_end:
            return True
        return settings.every_steps > 0 and step % settings.every_steps == 0

    def _is_written(self, step: int) -> bool:
        return any(line["step"] == step for line in read_metrics(self._folder.metrics))

    def _write_or_keep(self, step: Step) -> None:
        if self._has_evaluation(step.number):
            self.state.unwritten = step.metrics
        else:
            self._write(step)

    def _write(self, step: Step) -> None:
        self._trackers.log(step.number, step.metrics)
        self.state.unwritten = {}
        self._progress.summary(step.number, step.metrics)
