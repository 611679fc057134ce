"""The deadline of a request to the engines."""

import asyncio

import pytest

from slimrl.data.engine import EngineError
from slimrl.engines.retries import answered


async def test_a_deadline_of_the_attempts_own_is_not_called_the_requests():
    async def late() -> None:
        async with asyncio.timeout(0):
            await asyncio.sleep(1)

    with pytest.raises(TimeoutError):
        await answered("a", 600.0, late)


async def test_the_requests_deadline_is_told():
    with pytest.raises(EngineError, match=r"^a: no answer within 0.01 s$"):
        await answered("a", 0.01, lambda: asyncio.sleep(1))
