"""The deadline of a request to the engines, and how often it is sent within it. Nothing else sends a request again.

A request that did not reach an engine, or whose connection broke before the answer, is sent again: to another engine at
once, and where there is none after a delay. No token of a failed attempt is used, and the next attempt has the same
seed. At the deadline the attempt is cancelled, which aborts the request at its engine.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from slimrl.data.engine import EngineAbsent, EngineError, EngineUnreachable

RETRY_DELAYS_S = (0.2, 1.0, 3.0)
"""Seconds to wait before each attempt but the first."""

log = logging.getLogger(__name__)


async def _at_once() -> None:
    pass


async def answered[T](
    name: str,
    timeout_s: float,
    attempt: Callable[[], Awaitable[T | None]],
    *,
    ready: Callable[[], Awaitable[None]] = _at_once,
    has_others: Callable[[], bool] = lambda: False,
    waits_for_absent: bool = False,
) -> tuple[T, int]:
    """The answer to a request, and the number of attempts before the one that gave it.

    Args:
        name: of the request, in errors.
        attempt: sends the request; None if it has to be sent elsewhere, which does not count as a failure.
        ready: waits until there is an engine.
        has_others: whether an engine is left that has not failed.
        waits_for_absent: whether a request that reached no engine is sent until the deadline.

    Raises:
        EngineError: an engine refused it, the last attempt failed, or there was no answer before the deadline.
    """
    attempts = failures = 0
    lacks, cause = "answer", ""
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            while True:
                lacks = "engine became available"
                await ready()
                lacks = "answer"
                try:
                    if (answer := await attempt()) is not None:
                        return answer, attempts
                except EngineUnreachable as error:
                    cause = f": {error}"
                    if waits_for_absent and isinstance(error, EngineAbsent) and not has_others():
                        # It is no fault of the request, and the run replaces its engines.
                        delay_s = RETRY_DELAYS_S[-1]
                    elif failures == len(RETRY_DELAYS_S):
                        raise
                    else:
                        delay_s = 0.0 if has_others() else RETRY_DELAYS_S[failures]
                        failures += 1
                    log.info("%s is sent again in %g s: %s", name, delay_s, error)
                    await asyncio.sleep(delay_s)
                attempts += 1
    except TimeoutError as error:
        if not deadline.expired():
            raise  # the attempt's own
        raise EngineError(f"{name}: no {lacks} within {round(timeout_s, 2):g} s{cause}") from error
