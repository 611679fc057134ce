"""A run of `slimrl train`: it adds engines, rollouts, evaluations and the resync."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from slimrl.agent.roles.player import plays_past
from slimrl.algorithms.selection import Selection
from slimrl.base.errors import RunError, StepDropped
from slimrl.config.schema.rollout import RolloutMode
from slimrl.data.engine import RUN_EVALUATION
from slimrl.data.mixture import DataOrder
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Trajectory
from slimrl.evaluation.estimates import eval_metrics
from slimrl.evaluation.item import Item, write_items
from slimrl.observability.metrics import read_metrics
from slimrl.observability.report import write_curve
from slimrl.observability.samples import as_markdown, first_of_groups, write_samples
from slimrl.rollout.environment_metrics import environment_metrics
from slimrl.rollout.group_filters import GroupFilters
from slimrl.rollout.group_ledger import GroupLedger
from slimrl.rollout.loop_lag import loop_lag_metrics
from slimrl.rollout.prompt_source import PromptSource
from slimrl.rollout.service import RolloutService
from slimrl.rollout.stage import RolloutStage
from slimrl.rollout.statistics import rollout_metrics, source_metrics, teacher_metrics
from slimrl.rollout.step_rollout import StepRollout
from slimrl.rollout.task.task import Task
from slimrl.runtime.background_evaluation import BackgroundEvaluation, Evaluated
from slimrl.runtime.checkpoint_writer import CheckpointPart, CheckpointWriter, WrittenAtOnce
from slimrl.runtime.cluster.engine_group import EngineGroup
from slimrl.runtime.cluster.memory_phases import MemoryPhase, MemorySchedule
from slimrl.runtime.learner import Learner
from slimrl.runtime.live_metrics import LiveMetrics
from slimrl.runtime.past_versions import PastVersions
from slimrl.runtime.recording import Recording
from slimrl.runtime.reward_watch import RewardWatch
from slimrl.runtime.run import Run
from slimrl.runtime.score_check import ScoreCheck
from slimrl.runtime.step_metrics import Step
from slimrl.runtime.weight_sync import WeightSync

ROLLOUT_PART = "rollout"
"""Folder of a checkpoint with the groups of the rollout service"""


@dataclass(kw_only=True, eq=False)
class TrainRun(Run):
    """A started run of `slimrl train`, with its engines."""

    data: DataOrder[Prompt]
    task: Task
    engines: EngineGroup
    stage: RolloutStage
    past_engines: EngineGroup | None = None
    """Engines of older versions, if any play"""
    checkpoint: Path | None = None
    """Checkpoint that the run continues from"""
    left_out: Collection[str] = ()
    """Ids of prompts that the run leaves out"""

    def __post_init__(self) -> None:
        super().__post_init__()
        prompts = list(chain(*self.task.train.values()))
        self._ledger = GroupLedger(self.folder.groups)
        self._service = RolloutService(
            self.recipe,
            PromptSource(
                self.recipe,
                self.data,
                [prompt for prompt in prompts if prompt.prompt_id not in self.left_out],
                self.state.prompt_results,
            ),
            prompts,
            self.stage,
            GroupFilters(self.recipe.reward.group_filters, self.task.group_filters),
            self._ledger,
            self.left_out,
        )
        self.learner = Learner(
            self.recipe, self.trainers, self.state, self.critics, say=self.progress.say, folder=self.folder
        )
        self._score_check = ScoreCheck(self.recipe, self.stage, self.trainers)
        self._reward_watch = RewardWatch(self.recipe.reward, self.task.rewards.parts, self.state, self.progress)
        self._recording = Recording(self.recipe.tracking, self.folder, self.task, self.state.step, self.progress.say)
        self._memory = MemorySchedule(self.engines, self.trainers, enabled=self.recipe.rollout.colocated)
        self._background = BackgroundEvaluation(
            self.recipe, self.task.eval_sets, self.stage, self.engines, self.progress
        )
        if self.recipe.rollout.mode is not RolloutMode.sync:
            for group in self._groups:
                group.meanwhile = self.stage.check
        self._past = None
        if self.past_engines is not None:
            self._past = PastVersions(
                self.recipe,
                self.state,
                self.trainers,
                self.past_engines,
                self.folder.past_versions,
                [writer.folder for writer in self._writers],
                lambda: [state for writer in self._writers if (state := writer.pending) is not None],
            )
        self._weights = WeightSync(self.recipe, self.state, self.trainers, self.engines, self._memory, self.progress)

    def live_metrics(self) -> LiveMetrics:
        return LiveMetrics(
            self.folder.path.name,
            self._service,
            self.stage,
            lambda: {address.name: address.url for address in self.engines.addresses},
        )

    def sync_initial_weights(self) -> None:
        """Send the trainer's weights to the engines, and run the evaluation that is due before the next step.

        A new run evaluates its initial weights, as step 0. A resumed run evaluates its last step if that ended before
        its evaluation.
        """
        start = Step(0)
        self._send_weights(start)
        if self.state.step == 0:
            start.close()
            self._end(start)
        elif self.state.unwritten and not self._is_written(self.state.step):
            self._end(Step(self.state.step, self.state.unwritten))
        else:
            self.state.unwritten = {}
        if self.evaluation_is_due():
            self.evaluate()
        self._ledger.keep(self.state.step)
        saved = self._saved_rollout
        if saved is not None and not self.recipe.rollout.spans_steps:
            self.progress.say("the groups that the run had begun beside its steps are left out: rollout.mode is sync")
            saved = None
        self._service.start(self.state.step, self.state.weight_version, saved)

    @contextmanager
    def next_step(self) -> Iterator[Step]:
        """As in every run. The trajectories of a step that ends the run are recorded too."""
        with super().next_step() as step:
            try:
                yield step
            except RunError:
                self._recording.write_step()
                self._recording.finish()
                raise

    def rollout(self, step: Step) -> Selection:
        """What the step trains on: of the trajectories of the next prompts, and of those that replace zero-variance
        groups.

        Raises:
            RunError: too many trajectories failed, or a group filter did.
            StepDropped: the run was preempted and the grace period is over.
        """
        if self._past is not None:
            self._past.load_for(step.number)
        batch = self._take()
        if dropped := batch.metrics.get("async/dropped_groups"):
            self.progress.say(f"step {step.number}: groups that became too old and were dropped: {dropped:g}")
        if batch.metrics.get("async/current_token_fraction") == 0 and self._score_check.is_due(step.number):
            metrics = self._score_check.measure(step.number, batch.sampled, self._check_serving)
            step.record(metrics)
            self.learner.limit_mismatch(step, metrics)
        if self.recipe.rollout.oversample > 1:
            # Until the resync: the trainer may need the engines' devices.
            self.engines.pause()
        self._record(step, batch)
        self._memory.enter(MemoryPhase.train)
        return batch.selection

    def _take(self) -> StepRollout:
        """The service's next batch. Where its groups run one by one, those that wait for it are shown."""
        if not self.recipe.rollout.spans_steps:
            return self._service.take(self._check_wait)
        with self.progress.phase("rollout", self.recipe.rollout.prompts_per_step, "groups") as phase:

            def check() -> None:
                phase.update(min(len(self._service.admission.waiting), self.recipe.rollout.prompts_per_step))
                self._check_wait()

            return self._service.take(check)

    def _record(self, step: Step, batch: StepRollout) -> None:
        """Record the metrics of a rollout and write some of its trajectories."""
        step.record({**rollout_metrics(batch.sampled, batch.seconds), **batch.metrics})
        step.record(environment_metrics(batch.sampled))
        step.record(loop_lag_metrics(self.stage.take_lags()))
        step.record(self.stage.pressure.take())
        step.record(self._reward_watch.metrics(batch.sampled))
        step.record(teacher_metrics(batch.sampled, self.stage.take_scoring()))
        if self._past is not None:
            step.record(self._past.count(batch.sampled))
        if len(self.task.train) > 1:
            step.record(source_metrics(batch.sampled, self._recording.sources))
        if self.recipe.data.max_prompt_tokens is not None:
            step.record({"data/left_out_prompts": self.task.num_left_out})
        limit = self.recipe.tracking.trajectories_per_step
        write_samples(self.folder.sample_file(step.number), batch.sampled, batch.prompts, limit)
        if self.recipe.tracking.texts:
            self.trackers.log_texts(step.number, [as_markdown(one) for one in first_of_groups(batch.sampled, limit)])
        self._recording.choose(step, batch)

    def before_resync(self, step: Step) -> None:
        """Wait for the rollouts if the mode says so, and for a background evaluation if another is due.

        Before, the step's trajectories are recorded, with what the updates found: their file is written beside.
        """
        self.look_at_checkpoints()
        self._recording.write_step()
        if self.recipe.rollout.mode is RolloutMode.one_step_off:
            with step.timed("drain"):
                self._service.drain(self._check_drain, lambda: self.preemption.asked)
        if self.recipe.eval.engines:
            # No part of the resync: it may take many times as long.
            with step.timed("eval_wait"):
                if self._has_evaluation(step.number):
                    # Its engines get the weights that are to be evaluated next.
                    self._take_evaluated()
                elif (evaluated := self._background.take()) is not None:
                    self._write_evaluated(evaluated)

    def resync(self, step: Step) -> None:
        """Send the weights as the next version."""
        self.state.weight_version += 1
        self._send_weights(step)
        self._service.advance(self.state.weight_version)

    def evaluation_is_due(self) -> bool:
        return bool(self.state.unwritten)

    def evaluate(self) -> None:
        """Measure the policy on every evaluation set, which completes the metrics of the last step.

        With `eval.engines` it only begins here, after the one before, and a later resync or the end takes its results.

        Raises:
            RunError: too many trajectories failed.
        """
        step = Step(self.state.step, self.state.unwritten)
        label = f"{RUN_EVALUATION}{step.number:06d}"
        self._take_evaluated()
        if step.number < self.recipe.steps and self._background.begin(step.number, self.state.weight_version, label):
            self._write(step)
            return
        with step.timed("eval"), self._rollouts_held():
            if self._past is not None and plays_past(chain(*self.task.eval_sets.values()), self.recipe.agent):
                self._past.load_first()
            for name, prompts in self.task.eval_sets.items():
                seen: list[Trajectory] = []
                items = self.stage.evaluate(name, prompts, label=label, check=self._serve_again, seen=seen.append)
                self._record_items(step, name, items, seen)
        if not self.recipe.rollout.spans_steps:
            # The next step's are those of its rollout.
            self.stage.take_lags()
        self._write(step)

    def finish(self) -> None:
        if self.preemption.asked and (step := self._background.step) is not None:
            self.progress.say(f"the evaluation of step {step} had not ended and is given up")
        else:
            self._take_evaluated()
        self._recording.finish()
        super().finish()

    def _take_evaluated(self) -> None:
        """Wait for a background evaluation, if there is one."""
        if (evaluated := self._background.wait(self.stage.check)) is not None:
            self._write_evaluated(evaluated)

    def _write_evaluated(self, evaluated: Evaluated) -> None:
        step = Step(evaluated.step, {"time/eval_s": evaluated.seconds})
        for name, items in evaluated.sets.items():
            self._record_items(step, name, items, evaluated.trajectories[name])
        self.trackers.log(step.number, step.metrics)
        self.progress.evaluation(step.number, step.metrics)

    def _record_items(self, step: Step, name: str, items: list[Item], trajectories: list[Trajectory]) -> None:
        step.record(eval_metrics(items, self.recipe.eval))
        shown = [item for item in items if item.sample == 0][: self.recipe.tracking.trajectories_per_step]
        write_items(self.folder.eval_sample_file(step.number, name), shown)
        self._recording.write_evaluation(step.number, name, self.task.eval_sets[name], trajectories)

    def _position(self) -> dict[str, Any]:
        return self._service.position()

    def _parts(self) -> dict[str, CheckpointPart]:
        # Without groups that span steps, the position in the data is all that there is.
        of_rollout = {ROLLOUT_PART: WrittenAtOnce(self._service.save)} if self.recipe.rollout.spans_steps else {}
        return super()._parts() | of_rollout

    @property
    def _saved_rollout(self) -> Path | None:
        """Folder of the rollout service in the checkpoint that the run continues from; None if it has none."""
        folder = None if self.checkpoint is None else self.checkpoint / ROLLOUT_PART
        return folder if folder is not None and folder.is_dir() else None

    @contextmanager
    def _rollouts_held(self) -> Iterator[None]:
        """Let no group of the rollout service begin inside the block."""
        self._service.hold(True)
        yield
        self._service.hold(False)

    def _check_wait(self) -> None:
        """Check the run while the trainer waits for a batch, and complete the checkpoints whose files are written.

        On preemption a step whose groups are all its own may end within the grace period. Else a checkpoint is saved at
        once, so that nothing that is finished is lost.
        """
        self._check_serving()
        self.look_at_checkpoints()
        if not self.recipe.rollout.spans_steps:
            self.preemption.check()
        elif self.preemption.asked:
            if self.state.step > 0:
                # Also if the step's checkpoint is there: other groups have ended since.
                self.save_checkpoint()
            raise StepDropped("the run ends while it waits for groups")

    def _check_serving(self) -> None:
        """Check the engines while something waits for them, with the weights that they have."""
        self.stage.check()
        self._serve_again()

    def _check_drain(self) -> None:
        """Check the engines while the groups end that began before the update."""
        self.stage.check()
        self._serve_again(updates=1)

    def _serve_again(self, *, updates: int = 0) -> None:
        """Send the trainer's weights to a restarted engine where no other is left that serves.

        Args:
            updates: that the rollout service has not been told of.
        """
        if self.engines.need_weights:
            self.state.weight_version += 1
            # Before a token has this version.
            self._service.note_version(self.state.weight_version, updates)
            self._send_weights(None)

    def _save(self, writers: Sequence[CheckpointWriter]) -> None:
        self._memory.enter(MemoryPhase.save)
        super()._save(writers)
        self._memory.enter(MemoryPhase.rollout)
        if self._past is not None:
            self._past.clean()

    def export_step(self) -> None:
        self._memory.enter(MemoryPhase.exchange)
        super().export_step()
        self._memory.enter(MemoryPhase.rollout)

    def end_trainers(self) -> None:
        self._service.end()
        self._background.give_up()
        self._recording.finish()
        super().end_trainers()

    def restart_trainers(self, checkpoint: Path | None) -> None:
        with self._memory.trainer_starts():
            super().restart_trainers(checkpoint)

    def _export(self) -> None:
        """Draw the curve, then export."""
        write_curve([self.folder.metrics], self.folder.curve, title=self.recipe.run.name)
        self._memory.enter(MemoryPhase.exchange)
        super()._export()
        self.progress.say(f"curve: {self.folder.curve}")

    def _send_weights(self, step: Step | None) -> None:
        self._weights.send(step)
        if self._past is not None and step is not None:
            self._past.keep(step.number)
        self._memory.enter(MemoryPhase.rollout)

    def _has_evaluation(self, step: int) -> bool:
        settings = self.recipe.eval
        if not self.task.eval_sets:
            return False
        if step == 0:
            return settings.at_start
        if step == self.recipe.steps and settings.at_end:
            return True
        return settings.every_steps > 0 and step % settings.every_steps == 0

    def _is_written(self, step: int) -> bool:
        """Whether the step has its metrics, and its evaluation if it has one."""
        line = next((line for line in read_metrics(self.folder.metrics) if line["step"] == step), {})
        return bool(line) and ("time/eval_s" in line or not self._has_evaluation(step))

    def _end(self, step: Step) -> None:
        """Write the step's metrics, or keep them until its evaluation if it has one."""
        if step.number > max(0, self.recipe.critic.warmup_steps) and "policy/loss" not in step.metrics:
            self.progress.say(
                f"step {step.number}: the policy learned nothing, since all groups have zero variance or are left out"
            )
        if self._has_evaluation(step.number):
            self.state.unwritten = step.metrics
        else:
            self._write(step)

    def _write(self, step: Step) -> None:
        super()._write(step)
        self.state.unwritten = {}
