"""Sends new weights to the engines of a run, and replaces engines that fail meanwhile.

1. The trainer sends its weights as the next version. The report names the engines that failed and were left out.
2. They are restarted in the background (engine_group.py), and get a later version. Where all have failed, the first
   that is up again gets this one.

Engines that share the trainer's devices cannot start while it holds its memory. There,

2. their servers are restarted at the same address, paused, while the trainer releases its memory;
3. the trainer sends the weights to all engines again, as another version. No engine generates before that.

After `rollout.max_replacements` replacements, the next failure stops the run.
"""

import logging
import time
from collections.abc import Mapping

from slimrl.base.errors import RunError, StageError
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.rollout import RolloutMode
from slimrl.observability.progress import Progress
from slimrl.resync.session import ResyncReport
from slimrl.runtime.cluster.engine_actor import EngineAddress
from slimrl.runtime.cluster.engine_group import EngineGroup
from slimrl.runtime.cluster.memory_phases import MemoryPhase, MemorySchedule
from slimrl.runtime.cluster.trainer_group import TrainerGroup
from slimrl.runtime.state import RunState
from slimrl.runtime.step_metrics import Step

log = logging.getLogger(__name__)


class WeightSync:
    """Sends the weights, numbers their versions, and replaces engines that fail in a resync."""

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
        self._connected: list[EngineAddress] = []
        self._num_replaced = 0
        """Number of replaced engines at the last step's resync"""

    def send(self, step: Step | None) -> None:
        """Send the weights as `state.weight_version`; where engines share devices, as later versions until all of them
        have it.

        Memory is in MemoryPhase.exchange afterwards.

        Args:
            step: gets the metrics. None between the resyncs of two steps, of which the later one counts what was
                replaced.

        Raises:
            RunError: loaded tensors differ from the trainer's, or more engines failed than a run may replace.
        """
        self._memory.enter(MemoryPhase.exchange)
        report = self._resync_to_some()
        while report.failed_engines and self._recipe.rollout.colocated:
            self._replace(report.failed_engines, report.version)
            self._state.weight_version += 1
            report = self._resync()
        if report.failed_engines:
            self._engines.restart(report.failed_engines)
        self._engines.have_weights({address.name for address in self._connected} - report.failed_engines.keys())
        if step is None:
            return
        metrics = {
            "resync/bytes": report.bytes,
            "resync/written_bytes": report.written_bytes,
            "resync/changed_fraction": report.changed_fraction,
            "resync/seconds": report.seconds,
            "resync/version": report.version,
            "resync/engines": len(self._connected) - len(report.failed_engines),
            "resync/verified_tensors": report.verified_tensors,
            "resync/fingerprint_mismatches": len(report.mismatching),
            "resync/stale_requests": report.stale_requests,
            "resync/replaced_engines": self._engines.num_replaced - self._num_replaced,
        }
        self._num_replaced = self._engines.num_replaced
        step.record({name: value for name, value in metrics.items() if value is not None})

    def _resync_to_some(self) -> ResyncReport:
        """Resync with the engines there are. In an asynchronous rollout, wait for one while all restart, also if that
        is only found out here."""
        if self._recipe.rollout.mode is RolloutMode.sync:
            return self._resync()
        while True:
            self._engines.wait_for_receivers()
            try:
                return self._resync()
            except StageError as error:
                if not self._engines.have_all_ended():
                    raise
                log.warning(
                    "version %d is sent again when an engine has started: %s", self._state.weight_version, error
                )

    def _resync(self) -> ResyncReport:
        if (receivers := self._engines.receivers) != self._connected:
            self._trainers.connect_engines(receivers)
            self._connected = receivers
        report = self._trainers.resync(self._state.weight_version)
        if report.mismatching:
            raise RunError(
                f"weight version {report.version}: {len(report.mismatching)} tensors differ between trainer and "
                f"engines after the resync: {', '.join(report.mismatching[:5])}"
            )
        failed, engines = len(report.failed_engines), len(self._connected)
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
        log.warning("replacing engines that failed in the resync of version %d: %s", version, causes)
        start = time.monotonic()
        self._memory.enter(MemoryPhase.replace)
        self._engines.replace(failed)
        self._memory.enter(MemoryPhase.exchange)
        seconds = time.monotonic() - start
        self._progress.say(f"replaced after the resync of version {version}, in {seconds:.0f} s: {causes}")
