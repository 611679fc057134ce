"""What all training runs share: numbered steps, their metrics, checkpoints, the final export."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimrl.base.errors import RunError, StepDropped
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.run import CheckpointConfig
from slimrl.data.mixture import DataOrder
from slimrl.observability.expert_load import write_expert_load
from slimrl.observability.profiling.recorder import Recorder
from slimrl.observability.progress import Progress
from slimrl.observability.run_folder import RunFolder
from slimrl.observability.trackers import Trackers
from slimrl.runtime.checkpoint_writer import CheckpointPart, CheckpointWriter
from slimrl.runtime.cluster.trainer_group import TrainerGroup
from slimrl.runtime.memory_folder import MemoryFolder
from slimrl.runtime.preemption import Preemption
from slimrl.runtime.state import CheckpointFolder, RunState, read_state
from slimrl.runtime.step_metrics import Step
from slimrl.runtime.stop_rule import count_crossed, limits_of, stop_report

log = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class Run:
    """A started run: the trainer has the weights of `state`."""

    recipe: Recipe
    folder: RunFolder
    trainers: TrainerGroup
    trackers: Trackers
    progress: Progress
    state: RunState
    preemption: Preemption
    data: DataOrder[Any] | None
    """The steps' data; None if every step trains on the same data, and then no checkpoint is kept."""
    summary_every_steps: int = 1
    """Steps between rows on the terminal; the first and the last step are always shown."""
    critics: TrainerGroup | None = None
    recorder: Recorder | None = None
    """Recorder of a run that is profiled"""
    memory_folder: MemoryFolder | None = None
    """Folder of the copies in memory, if the run makes any"""

    def __post_init__(self) -> None:
        folder = CheckpointFolder(self.folder.checkpoints)
        self._checkpoints = CheckpointWriter(folder, self.recipe.checkpoint, self.folder.note_checkpoint)
        self._copies = None
        if self.memory_folder is not None:
            newest = CheckpointConfig(keep=1)
            self.memory_folder.nodes.use([node for group in self._groups for node in group.nodes])
            for group in self._groups:
                group.folders = self.memory_folder
            self._copies = CheckpointWriter(self.memory_folder, newest, lambda step: log.info("copy of step %d", step))

    @property
    def should_continue(self) -> bool:
        return self.state.step < self.recipe.steps and not self.preemption.asked

    @property
    def _writers(self) -> list[CheckpointWriter]:
        return [self._checkpoints] if self._copies is None else [self._checkpoints, self._copies]

    def look_at_checkpoints(self) -> None:
        """Complete the checkpoints whose files are written."""
        for writer in self._writers:
            writer.look()

    @contextmanager
    def next_step(self) -> Iterator[Step]:
        """The next step, which counts when the block ends; a dropped step does not count.

        Raises:
            RunError: the stop rule ends the run here; the step is complete and its checkpoint saved.
        """
        self.look_at_checkpoints()
        step = Step(self.state.step + 1, note=self.progress.part)
        recorded = nullcontext() if self.recorder is None else self.recorder.step(step.number, self.trainers)
        try:
            with self.progress.step(step.number), recorded:
                yield step
        except StepDropped as dropped:
            self.progress.say(f"step {step.number} dropped: {dropped}")
            return
        step.close()
        if step.expert_load:
            write_expert_load(self.folder.expert_load_file(step.number), step.number, step.expert_load)
        self.state.step = step.number
        if self.data is not None:
            self.state.cursor = self._position()
        report = self._stop_report(step)
        self._end(step)
        if report is not None:
            raise RunError(self._saved_before_stop(report))

    def _position(self) -> dict[str, Any]:
        """Position in the training data."""
        assert self.data is not None
        return self.data.state()

    def checkpoint_is_due(self) -> bool:
        """Whether a checkpoint is due: at the last step, every `checkpoint.every_steps` and on preemption, unless this
        step is saved already."""
        step, every = self.state.step, self.recipe.checkpoint.every_steps
        if step == 0 or self.data is None or self._checkpoints.holds(step):
            return False
        return step == self.recipe.steps or self.preemption.asked or (every > 0 and step % every == 0)

    def save_checkpoint(self) -> None:
        """Begin a checkpoint, and a copy in memory if that is due too; they are written beside the next steps."""
        self._save([*self._due_copies(), self._checkpoints])

    def copy_is_due(self) -> bool:
        """Whether a copy in memory is due, every `checkpoint.in_memory_every_steps`."""
        return bool(self._due_copies())

    def save_copy(self) -> None:
        """Begin a copy in memory, which is written beside the next steps."""
        self._save(self._due_copies())

    def _due_copies(self) -> list[CheckpointWriter]:
        copies, step = self._copies, self.state.step
        # Nothing follows that could be lost.
        if copies is None or not self.should_continue or step == 0 or copies.holds(step):
            return []
        return [] if step % self.recipe.checkpoint.in_memory_every_steps else [copies]

    def _save(self, writers: Sequence[CheckpointWriter]) -> None:
        with self.progress.part("saving a checkpoint"):
            for writer in writers:
                writer.begin(self.state, self._parts())

    def export_is_due(self) -> bool:
        """Whether the model of the last step is exported beside the one at the end."""
        step, every = self.state.step, self.recipe.checkpoint.export_every_steps
        return every > 0 and step > 0 and step % every == 0

    def export_step(self) -> None:
        """Export the model of the last step."""
        self.trainers.export_hf(self.folder.fresh_step_export(self.state.step))

    def complete_checkpoint(self, *, copies: bool = False) -> None:
        """Wait until the checkpoint that was begun is complete, for a run that fails otherwise; log what fails here.

        Args:
            copies: likewise the copy in memory, for a run that goes on from there.
        """
        if any(group.has_failed for group in self._groups):
            # The other ranks wait for the one that has failed.
            return
        for writer in self._writers if copies else [self._checkpoints]:
            try:
                writer.finish()
            except RunError as error:
                log.warning("%s", error)

    def _parts(self) -> dict[str, CheckpointPart]:
        """The parts of a checkpoint, by the names of their folders."""
        return {group.role: group for group in self._groups}

    @property
    def _groups(self) -> list[TrainerGroup]:
        return [group for group in (self.trainers, self.critics) if group is not None]

    def end_trainers(self) -> None:
        """End all ranks and what runs beside them; the run may go on after `restart_trainers` as another object."""
        for group in self._groups:
            group.end()
        for writer in self._writers:
            writer.abandon()

    def restart_trainers(self, checkpoint: Path | None) -> None:
        """Start ranks in the place of those that have ended.

        Args:
            checkpoint: that they load; None for the weights that the recipe names. The policy's ranks compare its files
                with their checksums, but for a copy in memory, whose files are on several nodes.

        Raises:
            StageError: a rank does not start, or the checkpoint is damaged.
        """
        files = None
        if checkpoint is not None and checkpoint.parent == self.folder.checkpoints:
            _, files = read_state(checkpoint)
        self.trainers.restart(checkpoint, files)
        if self.critics is not None:
            self.critics.restart(checkpoint)

    def forget_copy(self, checkpoint: Path | None) -> bool:
        """Remove a copy in memory that ranks cannot load; False if the checkpoint is no such copy."""
        return checkpoint is not None and self.memory_folder is not None and self.memory_folder.forget(checkpoint)

    def finish(self) -> None:
        """Export the model, or only save a checkpoint if the run was preempted."""
        if self.checkpoint_is_due():
            # The preemption signal came after the last check of the loop.
            self.save_checkpoint()
        for writer in self._writers:
            writer.finish()
        if self.state.step >= self.recipe.steps:
            self._export()

    def _stop_report(self, step: Step) -> str | None:
        """What the stop rule says after a step; None to continue."""
        try:
            self.state.crossed = count_crossed(self.state.crossed, step.metrics, limits_of(self.recipe.stop))
        except ValueError as error:
            raise RunError(f"step {step.number}: {error}") from error
        return stop_report(self.state.crossed, step.metrics, step.number, self.recipe)

    def _saved_before_stop(self, report: str) -> str:
        """Save the checkpoint of the last step, if the run keeps any, and add to the report how to continue."""
        if self.data is None:
            return report
        if not self._checkpoints.holds(self.state.step):
            self.save_checkpoint()
        self._checkpoints.finish()
        return f"{report}\nIts checkpoint is saved: --resume continues after this step."

    def _end(self, step: Step) -> None:
        """Handle the metrics of a complete step."""
        self._write(step)

    def _export(self) -> None:
        """Export the model as a Hugging Face checkpoint. A run with an export is complete and cannot be resumed."""
        with self.progress.part("exporting the model"):
            self.trainers.export_hf(self.folder.fresh_export())
        self.progress.say(f"model: {self.folder.export}")

    def _write(self, step: Step) -> None:
        self.trackers.log(step.number, step.metrics)
        if step.number % self.summary_every_steps == 0 or step.number in (1, self.recipe.steps):
            self.progress.summary(step.number, step.metrics)
