"""New weights into all engines of a run, those included that fail on the way.

1. The trainer sends its weights as the next version. The report names the engines that failed and were left out.
2. Their servers are ended by pid and started anew at the same address, paused, with the weights of the checkpoint;
   a trainer on the same devices gives its memory away meanwhile.
3. The weights go to all engines again, as the version after; nobody is asked for a token before that.
A run that has started `rollout.max_replacements` engines anew stops at the next one that fails.
"""

import logging
import time
from collections.abc import Mapping

from slimrl.config.schema import Recipe
from slimrl.observability.progress import Progress
from slimrl.resync.session import ResyncReport
from slimrl.runtime.engine_group import EngineGroup
from slimrl.runtime.errors import RunError
from slimrl.runtime.hand_over import HandOver, Stage
from slimrl.runtime.state import RunState
from slimrl.runtime.step import Step
from slimrl.runtime.trainer_group import TrainerGroup

log = logging.getLogger(__name__)


class WeightSync:
    """Keeps count of versions."""

    def __init__(
        self,
        recipe: Recipe,
        state: RunState,
        trainers: TrainerGroup,
        engines: EngineGroup,
        memory: HandOver,
        progress: Progress,
    ) -> None:
        self._recipe, self._state = recipe, state
        self._trainers, self._engines, self._memory, self._progress = trainers, engines, memory, progress

    def connect(self) -> None:
        """Introduce trainer and engines, before anything is sent."""
        self._trainers.connect_engines(self._engines.addresses)

    def send(self, step: Step) -> None:
        """Send the weights as `state.weight_version`, and as later versions until all engines have one.

        Memory is handed to Stage.exchange, and stays so.

        Raises:
            RunError: loaded tensors differ from the trainer's, or more engines failed than a run may replace.
        """
        replaced_before = self._engines.num_replaced
        self._memory.enter(Stage.exchange)
        report = self._resync()
        while report.failed_engines:
            self._replace(report.failed_engines, report.version)
            self._state.weight_version += 1
            report = self._resync()
        step.record(resync_metrics(report))
        step.record({"resync/replaced_engines": self._engines.num_replaced - replaced_before})

    def _resync(self) -> ResyncReport:
        report = self._trainers.resync(self._state.weight_version)
        _refuse_mismatches(report)
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
        causes = "; ".join(f"{name}: {reason}" for name, reason in failed.items())
        limit = self._recipe.rollout.max_replacements
        replaced = self._engines.num_replaced
        if replaced + len(failed) > limit:
            raise RunError(
                f"engines failed in the resync of version {version}, and rollout.max_replacements = {limit} allows "
                f"no more to be replaced ({replaced} were): {causes}"
            )
        log.warning("replacing engines that failed in the resync of version %d: %s", version, causes)
        start = time.monotonic()
        self._memory.enter(Stage.replace)
        self._engines.replace(list(failed))
        self._memory.enter(Stage.exchange)
        self._trainers.use_engines(self._engines.addresses)
        seconds = time.monotonic() - start
        self._progress.say(f"replaced after the resync of version {version}, in {seconds:.0f} s: {causes}")


def resync_metrics(report: ResyncReport) -> dict[str, float]:
    written = {} if report.written_bytes is None else {"resync/written_bytes": report.written_bytes}
    changed = {} if report.changed_fraction is None else {"resync/changed_fraction": report.changed_fraction}
    return {
        "resync/bytes": report.bytes,
        **written,
        **changed,
        "resync/seconds": report.seconds,
        "resync/version": report.version,
        "resync/fingerprint_mismatches": len(report.mismatching),
        "resync/stale_requests": report.stale_requests,
    }


def _refuse_mismatches(report: ResyncReport) -> None:
    if report.mismatching:
        raise RunError(
            f"weight version {report.version}: {len(report.mismatching)} tensors differ between trainer and engines "
            f"after the resync: {', '.join(report.mismatching[:5])}"
        )
