"""How the trainer's ranks decide together whether a version continues, starts again or fails."""

import logging

from slimrl.data.engine import EngineError
from slimrl.resync.engine_calls import EngineCalls
from slimrl.resync.ranks import Ranks
from slimrl.resync.report import ResyncError

log = logging.getLogger(__name__)

CONTINUE, RETRY, FAIL = range(3)
"""The highest verdict of all ranks counts."""


class StartAgain(Exception):
    """Engines were taken out, or get another chance; the version starts again from its first bucket."""


def agree_on_outcome(ranks: Ranks, calls: EngineCalls, version: int, place: str, error: Exception | None) -> None:
    """Barrier of all ranks; raises on all where any of them has an error.

    Args:
        calls: this rank's; after an EngineError it takes out engines that cannot continue.
        place: where the error happened, for the message.
        error: of this rank. An OSError or ValueError is the trainer's own fault, or that of its weights.

    Raises:
        StartAgain, ResyncError: on all ranks alike.
        RankError: another rank died or is late.
    """
    verdict = CONTINUE
    if isinstance(error, EngineError):
        verdict = RETRY if calls.judge(error) else FAIL
    elif isinstance(error, OSError | ValueError):
        verdict = FAIL
    elif error is not None:
        raise error
    verdict = ranks.agree(verdict)
    if verdict == CONTINUE:
        return
    outcomes = ranks.gather_objects((len(calls.engines), None if error is None else str(error)))
    reasons = "; ".join(reason for _, reason in outcomes if reason is not None)
    if verdict == RETRY and sum(engines for engines, _ in outcomes):
        if ranks.rank == 0:
            log.warning("resync of version %d starts again after it failed %s: %s", version, place, reasons)
        raise StartAgain
    raise ResyncError(f"resync of version {version} failed {place}: {reasons}") from error
