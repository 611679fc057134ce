"""Generation in rounds, so that two runs with the same seed compute the same bits.

A CPU product's last bits depend on the shape of the batch, and an engine's batches depend on which requests happen
to have arrived. So arrival is taken out of it:
1. Sessions are announced (`open`) before the first of them asks, and leave (`close`) when they end. Where there are
   more than may be under way at once, the next one in order takes the place of one that has left.
2. A round starts once every session that is under way waits in `generate`.
3. Its requests go in order of session id, those of one engine as one call, which reaches its scheduler in one piece;
   the engine then prefills and decodes them in an order that depends on them alone.
4. The answers are handed out when all of the round's engines have answered.
A session's engine is chosen in its first round: the one with the fewest sessions, in order of session id.
The price is waiting for the slowest session of each round, and for the slowest tool call or reward between
rounds, while the time limits of all others go on.
"""

import asyncio
from collections.abc import Sequence

from slimrl.data.protocols import EngineError, GenerateRequest, GenerateResult
from slimrl.rollout.client import SglangEngine


class LockstepEngine:
    """Implements Engine. Every request must carry a seed."""

    def __init__(self, engines: Sequence[SglangEngine]) -> None:
        """engines: one client for each engine, connected to it directly and not through the router."""
        self._engines = list(engines)
        self._open: set[str] = set()
        self._at_once = 0
        self._engine_of: dict[str, int] = {}
        self._waiting: dict[str, tuple[GenerateRequest, asyncio.Future[GenerateResult]]] = {}
        self._round: asyncio.Task[None] | None = None

    def open(self, session_ids: Sequence[str], *, at_once: int) -> None:
        """Announce sessions; call it once for all that belong together.

        Raises:
            ValueError: a session is open already.
        """
        if again := self._open.intersection(session_ids):
            raise ValueError(f"already open: {sorted(again)[0]}")
        self._open.update(session_ids)
        self._at_once = at_once

    def close(self, session_id: str) -> None:
        """The session asks no more; unknown ones are ignored, so that closing twice is harmless."""
        self._open.discard(session_id)
        self._engine_of.pop(session_id, None)
        self._start_if_complete()

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Wait for the round and its answer.

        Raises:
            EngineError: the call that carried this request failed.
            ValueError: the session is not open, or the request has no seed.
        """
        session = request.session_id
        if session not in self._open:
            raise ValueError(f"session {session} was not opened")
        if request.seed is None:
            raise ValueError(f"session {session}: a request without a seed in a deterministic run")
        answer: asyncio.Future[GenerateResult] = asyncio.get_running_loop().create_future()
        self._waiting[session] = (request, answer)
        self._start_if_complete()
        try:
            return await answer
        finally:
            # Only still there if the caller was cancelled before the round began.
            if self._waiting.get(session, (None, None))[1] is answer:
                del self._waiting[session]

    async def aclose(self) -> None:
        """End a round under way and close the connections."""
        if self._round is not None:
            self._round.cancel()
            await asyncio.gather(self._round, return_exceptions=True)
        for engine in self._engines:
            await engine.aclose()

    def _start_if_complete(self) -> None:
        num_under_way = min(self._at_once, len(self._open))
        if self._round is None and self._waiting and len(self._waiting) == num_under_way:
            batch = [self._waiting[session] for session in sorted(self._waiting)]
            self._waiting = {}
            self._round = asyncio.get_running_loop().create_task(self._run_round(batch))

    async def _run_round(self, batch: list[tuple[GenerateRequest, asyncio.Future[GenerateResult]]]) -> None:
        try:
            shares: list[list[tuple[GenerateRequest, asyncio.Future[GenerateResult]]]] = [[] for _ in self._engines]
            for request, answer in batch:
                shares[self._assign(request.session_id)].append((request, answer))
            calls = [
                engine.generate_batch([request for request, _ in share])
                for engine, share in zip(self._engines, shares, strict=True)
                if share
            ]
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            for share, outcome in zip((share for share in shares if share), outcomes, strict=True):
                _hand_out([answer for _, answer in share], outcome)
        finally:
            self._round = None
            for _, answer in batch:
                answer.cancel()
        self._start_if_complete()

    def _assign(self, session: str) -> int:
        if session not in self._engine_of:
            loads = [0] * len(self._engines)
            for index in self._engine_of.values():
                loads[index] += 1
            self._engine_of[session] = loads.index(min(loads))
        return self._engine_of[session]


def _hand_out(answers: list[asyncio.Future[GenerateResult]], outcome: list[GenerateResult] | BaseException) -> None:
    for index, answer in enumerate(answers):
        if answer.done():
            continue
        if isinstance(outcome, EngineError):
            # One exception object per waiter: tracebacks are appended to it.
            answer.set_exception(EngineError(str(outcome)))
        elif isinstance(outcome, BaseException):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome[index])
