"""Errors of one trainer rank become known to all of them, which continue, start the version again or fail together."""

import logging

from slimrl.data.engine import EngineError
from slimrl.resync.engine_calls import EngineCalls
from slimrl.resync.ranks import Ranks
from slimrl.resync.report import ResyncError

log = logging.getLogger(__name__)

CONTINUE, RETRY, FAIL = range(3)
"""The highest outcome of any rank is that of all."""


class StartAgain(Exception):
    """Engines were taken out, or get another chance; the version starts again from its first bucket."""


def sync_errors_across_ranks(
    ranks: Ranks, calls: EngineCalls, version: int, place: str, error: Exception | None
) -> None:
    """Barrier of all ranks; raises on all where any of them has an error.

    Args:
        calls: this rank's; after an EngineError it takes out engines that cannot continue.
        place: where the error happened, for the message.
        error: of this rank. An OSError or ValueError is the trainer's own fault, or that of its weights.

    Raises:
        StartAgain, ResyncError: on all ranks alike.
        RankError: another rank died or is late.
    """
    outcome = CONTINUE
    if isinstance(error, EngineError):
        outcome = RETRY if calls.judge(error) else FAIL
    elif isinstance(error, OSError | ValueError):
        outcome = FAIL
    elif error is not None:
        raise error
    outcome = ranks.agree(outcome)
    if outcome == CONTINUE:
        return
    results = ranks.gather_objects((len(calls.engines), None if error is None else str(error)))
    reasons = "; ".join(reason for _, reason in results if reason is not None)
    if outcome == RETRY and sum(engines for engines, _ in results):
        if ranks.rank == 0:
            log.warning("resync of version %d starts again after it failed %s: %s", version, place, reasons)
        raise StartAgain
    raise ResyncError(f"resync of version {version} failed {place}: {reasons}") from error
