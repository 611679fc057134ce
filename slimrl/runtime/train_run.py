"""Everything that a run of `slimrl train` holds, and the parts of a step that need the engines."""

from collections.abc import Iterator
from contextlib import contextmanager

from slimrl.config.schema import Recipe
from slimrl.data.prompts import Sampler
from slimrl.data.trajectory import Prompt, Trajectory
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
        """Give the engines the trainer's weights, and evaluate what a fresh run starts from as step 0."""
        self._weights.connect()
        fresh = self.state.step == 0
        start = Step(0)
        self._send_weights(start)
        if fresh and self.recipe.eval.at_start and self._task.eval_sets:
            with start.timed("eval"):
                self.evaluate(start)
        if fresh:
            self._write(start)

    @property
    def goes_on(self) -> bool:
        """Whether there is another step to make, and time for it."""
        return self.state.step < self.recipe.steps and not self._preemption.asked

    @contextmanager
    def next_step(self) -> Iterator[Step]:
        """A step that counts, and whose metrics are written, when it is complete; not so a dropped one."""
        step = Step(self.state.step + 1)
        try:
            yield step
        except StepDropped:
            self._progress.say(f"step {step.number} dropped: its rollout went on past checkpoint.grace_s")
            return
        self.state.step = step.number
        self.state.cursor = self._prompts.state()
        self._write(step)

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

    def evaluation_is_due(self, step: Step) -> bool:
        settings = self.recipe.eval
        last = step.number == self.recipe.steps
        return bool(self._task.eval_sets) and (
            (last and settings.at_end) or (settings.every_steps > 0 and step.number % settings.every_steps == 0)
        )

    def evaluate(self, step: Step) -> None:
        """Accuracy on every evaluation set."""
        for name, prompts in self._task.eval_sets.items():
            result, _ = self._stage.evaluate(name, prompts, label=f"eval_{step.number:06d}")
            step.record({f"eval/{name}/accuracy": result.accuracy})

    def checkpoint_is_due(self) -> bool:
        """At the last step, every so many, and before the run makes room; never of what is saved already."""
        step, every = self.state.step, self.recipe.checkpoint.every_steps
        if step == 0 or self._checkpoints.holds(step):
            return False
        return step == self.recipe.steps or self._preemption.asked or (every > 0 and step % every == 0)

    def save_checkpoint(self) -> None:
        """Write what a resume needs; the folder appears under its name when it is whole."""
        partial = self._checkpoints.begin(self.state.step)
        self._memory.enter(Stage.save)
        self._trainers.save_checkpoint(partial / "trainer")
        self._checkpoints.finish(partial, self.state, self.recipe.checkpoint.keep)
        self._folder.note_checkpoint(self.state.step)
        self._memory.enter(Stage.rollout)

    def finish(self) -> None:
        """The curve and the model as a Hugging Face checkpoint; nothing for a run that makes room before its end.

        The model comes last: where it is, the run is complete, and is not resumed.
        """
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

    def _write(self, step: Step) -> None:
        step.close()
        self._trackers.log(step.number, step.metrics)
        self._progress.summary(step.number, step.metrics)
