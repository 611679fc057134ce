"""How the trainer's ranks decide together whether a version goes on."""

import logging

from slimrl.data.protocols import EngineError
from slimrl.resync.fleet import Fleet
from slimrl.resync.ranks import Ranks
from slimrl.resync.report import ResyncError

log = logging.getLogger(__name__)

GO_ON, ASK, AGAIN, GIVE_UP = range(4)
"""Of the verdicts of all ranks the highest counts. Ask: a rank that has no engines met a fault that may be theirs."""


class SourceFailed(Exception):
    """A rank that has no engines could not send to them; one that has must find out whether it was their fault."""

    def __init__(self, place: str, reasons: str) -> None:
        super().__init__(reasons)
        self.place = place


class StartAgain(Exception):
    """Engines were taken out, or get another chance; the version starts again from its first bucket."""


def settle(ranks: Ranks, fleet: Fleet, version: int, place: str, error: Exception | None) -> None:
    """A barrier of all ranks that tells each what any of them met.

    Args:
        fleet: this rank's; a failed call is judged in it.
        place: what the error belongs to, for the message.
        error: of this rank; an OSError or a ValueError is the trainer's own fault, or that of its weights.

    Raises:
        SourceFailed, StartAgain, ResyncError: on all ranks alike.
        RankError: another rank died or is late.
    """
    verdict = GO_ON
    if isinstance(error, EngineError):
        verdict = ASK
        if fleet.engines:
            verdict = AGAIN if fleet.judge(error) else GIVE_UP
    elif isinstance(error, OSError | ValueError):
        verdict = GIVE_UP
    elif error is not None:
        raise error
    verdict = ranks.agree(verdict)
    if verdict == GO_ON:
        return
    outcomes = ranks.gather_objects((len(fleet.engines), None if error is None else str(error)))
    reasons = "; ".join(reason for _, reason in outcomes if reason is not None)
    if verdict == ASK:
        raise SourceFailed(place, reasons)
    if verdict == AGAIN and sum(engines for engines, _ in outcomes):
        if ranks.rank == 0:
            log.warning("resync of version %d starts again, since it failed %s: %s", version, place, reasons)
        raise StartAgain
    raise ResyncError(f"resync of version {version} failed {place}: {reasons}") from error
