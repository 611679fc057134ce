"""How the trainer's ranks decide together whether a version goes on."""

import logging

from slimrl.data.protocols import EngineError
from slimrl.resync.fleet import Fleet
from slimrl.resync.ranks import Ranks
from slimrl.resync.report import ResyncError

log = logging.getLogger(__name__)

GO_ON, ASK, AGAIN, GIVE_UP = range(4)
"""Of the verdicts of all ranks the highest counts. Ask: a rank that knows no engines met a fault that may be theirs."""


class StartAgain(Exception):
    """Engines were taken out, or get another chance; the version starts again from its first bucket."""


def settle(ranks: Ranks, fleet: Fleet, version: int, place: str, error: Exception | None) -> None:
    """A barrier of all ranks that tells each what any of them met.

    Args:
        fleet: this rank's; a failed call is judged in it.
        place: what the error belongs to, for the message.
        error: of this rank; an OSError or a ValueError is the trainer's own fault, or that of its weights.

    Raises:
        StartAgain, ResyncError: on all ranks alike.
        RankError: another rank died or is late.
    """
    verdict = GO_ON
    if isinstance(error, EngineError):
        verdict = _judged(fleet, error) if fleet.engines else ASK
    elif isinstance(error, OSError | ValueError):
        verdict = GIVE_UP
    elif error is not None:
        raise error
    verdict = ranks.agree(verdict)
    if verdict == GO_ON:
        return
    texts = ranks.gather_objects(None if error is None else str(error))
    reasons = "; ".join(dict.fromkeys(text for text in texts if text is not None))
    if verdict == ASK:
        verdict = ranks.agree(_judged(fleet, EngineError(reasons)) if fleet.engines else GO_ON)
    if verdict == AGAIN and sum(ranks.gather_objects(len(fleet.engines))):
        if ranks.rank == 0:
            log.warning("resync of version %d starts again, since it failed %s: %s", version, place, reasons)
        raise StartAgain
    raise ResyncError(f"resync of version {version} failed {place}: {reasons}") from error


def _judged(fleet: Fleet, error: EngineError) -> int:
    return AGAIN if fleet.judge(error) else GIVE_UP
