"""Sends new weights to all engines of a run, and replaces engines that fail meanwhile.

1. The trainer sends its weights as the next version. The report names the engines that failed and were left out.
2. Their servers are ended by pid and restarted at the same address, paused, with the checkpoint's weights. A trainer
   on the same devices releases its memory meanwhile.
3. The trainer sends the weights to all engines again, as another version. No engine generates before that.
After `rollout.max_replacements` replacements, the next failure stops the run.
"""

import logging
import time
from collections.abc import Mapping

from slimrl.config.schema.recipe import Recipe
from slimrl.observability.progress import Progress
from slimrl.resync.session import ResyncReport
from slimrl.runtime.cluster.engine_group import EngineGroup
from slimrl.runtime.cluster.errors import RunError
from slimrl.runtime.cluster.memory_phases import MemoryPhase, MemorySchedule
from slimrl.runtime.cluster.trainer_group import TrainerGroup
from slimrl.runtime.state import RunState
from slimrl.runtime.step_metrics import Step

log = logging.getLogger(__name__)


class WeightSync:
    """Counts the weight versions."""

    def __init__(
        self,
        recipe: Recipe,
        state: RunState,
        trainers: TrainerGroup,
        engines: EngineGroup,
        memory: MemorySchedule,
        progress: Progress,
    ) -> None:
        self._recipe, self._state = recipe, state
        self._trainers, self._engines, self._memory, self._progress = trainers, engines, memory, progress

    def send(self, step: Step) -> None:
        """Send the weights as `state.weight_version`, and as later versions until all engines have them.

        Memory is in MemoryPhase.exchange afterwards.

        Raises:
            RunError: loaded tensors differ from the trainer's, or more engines failed than a run may replace.
        """
        replaced_before = self._engines.num_replaced
        self._memory.enter(MemoryPhase.exchange)
        report = self._resync()
        while report.failed_engines:
            self._replace(report.failed_engines, report.version)
            self._state.weight_version += 1
            report = self._resync()
        metrics = {
            "resync/bytes": report.bytes,
            "resync/written_bytes": report.written_bytes,
            "resync/changed_fraction": report.changed_fraction,
            "resync/seconds": report.seconds,
            "resync/version": report.version,
            "resync/fingerprint_mismatches": len(report.mismatching),
            "resync/stale_requests": report.stale_requests,
            "resync/replaced_engines": self._engines.num_replaced - replaced_before,
        }
        step.record({name: value for name, value in metrics.items() if value is not None})

    def _resync(self) -> ResyncReport:
        report = self._trainers.resync(self._state.weight_version)
        if report.mismatching:
            raise RunError(
                f"weight version {report.version}: {len(report.mismatching)} tensors differ between trainer and "
                f"engines after the resync: {', '.join(report.mismatching[:5])}"
            )
        failed, engines = len(report.failed_engines), self._recipe.rollout.num_engines
        log.info(
            "resync of version %d: %s, %d bytes, %.3f s, %d of %d engines",
            report.version,
            self._recipe.resync.transport.value,
            report.bytes,
            report.seconds,
            engines - failed,
            engines,
        )
        return report

    def _replace(self, failed: Mapping[str, str], version: int) -> None:
        causes = "; ".join(failed.values())
        limit = self._recipe.rollout.max_replacements
        replaced = self._engines.num_replaced
        if replaced + len(failed) > limit:
            raise RunError(
                f"engines failed in the resync of version {version}, and rollout.max_replacements = {limit} allows "
                f"no more to be replaced ({replaced} were): {causes}"
            )
        log.warning("replacing engines that failed in the resync of version %d: %s", version, causes)
        start = time.monotonic()
        self._memory.enter(MemoryPhase.replace)
        self._engines.replace(list(failed))
        self._memory.enter(MemoryPhase.exchange)
        self._trainers.connect_engines(self._engines.addresses)
        seconds = time.monotonic() - start
        self._progress.say(f"replaced after the resync of version {version}, in {seconds:.0f} s: {causes}")
