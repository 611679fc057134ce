"""Engines that serve one request at a time each: what older versions of a deterministic run say.

The last bits of a request depend on what shares its batch. Rounds (lockstep.py) are for the policy's engines: with
rounds of their own beside those, each would wait for sessions that the other holds. So a request is alone here, and
which of the engines, all alike, serves it changes nothing.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from slimrl.data.engine import Engine, GenerateRequest, GenerateResult
from slimrl.engines.client import SglangEngine
from slimrl.engines.retries import answered


class OneByOne(Engine):
    """Implements Engine. One per event loop.

    Args:
        engines: with the same weights, without prefix caches.
    """

    def __init__(self, engines: Sequence[SglangEngine]) -> None:
        self._engines = list(engines)
        self._free: asyncio.Queue[SglangEngine] = asyncio.Queue()
        for engine in self._engines:
            self._free.put_nowait(engine)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Wait for a free engine and its answer; the deadline begins then. Raises EngineError."""
        engine = await self._free.get()
        try:
            name = f"session {request.session_id}"
            [result], attempts = await answered(name, request.timeout_s, lambda: engine.generate_batch([request]))
        finally:
            self._free.put_nowait(engine)
        return replace(result, num_retries=attempts)

    async def aclose(self) -> None:
        for engine in self._engines:
            await engine.aclose()
