"""A failed call of a reward function is repeated, as the recipe says."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

FIRST_DELAY_S = 0.5
"""Seconds to wait before the second attempt; before each further one it is twice as long."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Retries:
    limit: int = 0
    """Number of attempts after the first one."""
    errors: tuple[type[Exception], ...] = ()
    """The exceptions after which there is another attempt."""
    first_delay_s: float = FIRST_DELAY_S

    async def call[T](self, attempt: Callable[[], Awaitable[T]], name: str, on_retry: Callable[[], None]) -> T:
        """The result of the first attempt that succeeds. The caller's deadline covers all of them.

        Args:
            name: of what is called, for the log.
            on_retry: called before each attempt but the first.
        """
        for number in range(self.limit):
            try:
                return await attempt()
            except self.errors as error:
                delay_s = self.first_delay_s * 2**number
                log.warning("%s: retry in %g s: %s: %s", name, delay_s, type(error).__name__, error)
                await asyncio.sleep(delay_s)
                on_retry()
        return await attempt()


NO_RETRIES = Retries()
