"""Generation in rounds, so that two runs with the same seed compute the same bits.

The last bits of a matrix product depend on the shape of the batch, and an engine's batches depend on which requests
have arrived. Rounds make batches independent of arrival times:
1. Sessions are announced (`open`) before the first request, and leave (`close`) when they end. If there are more than
   may be active at once, the next one in order replaces one that has left.
2. A round starts once every active session waits in `generate`.
3. Its requests are ordered by session id. All requests to one engine are one call, which reaches its scheduler as a
   whole, so the order of prefill and decode depends on the requests alone.
4. The answers are returned when all engines of the round have answered.
A session's engine is chosen in its first round: the one with the fewest sessions, in order of session id.
The price: each round waits for its slowest session, tool call or reward, while the deadlines of all others run.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

from slimrl.data.engine import EngineError, GenerateRequest, GenerateResult
from slimrl.engines.client import SglangEngine
from slimrl.engines.retries import answered


class LockstepEngine:
    """Implements Engine. Every request must carry a seed."""

    def __init__(self, engines: Sequence[SglangEngine]) -> None:
        """engines: one client for each engine, connected directly and not through the router."""
        self._engines = list(engines)
        self._open: set[str] = set()
        self._at_once = 0
        self._engine_of: dict[str, int] = {}
        self._waiting: dict[str, tuple[GenerateRequest, asyncio.Future[GenerateResult]]] = {}
        self._round: asyncio.Task[None] | None = None

    def open(self, session_ids: Sequence[str], *, at_once: int) -> None:
        """Announce sessions; call it once for all sessions of a rollout.

        Raises:
            ValueError: a session is open already.
        """
        if again := self._open.intersection(session_ids):
            raise ValueError(f"already open: {sorted(again)[0]}")
        self._open.update(session_ids)
        self._at_once = at_once

    def close(self, session_id: str) -> None:
        """End a session; unknown ones are ignored, so closing twice is harmless."""
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
            # Still there only if the caller was cancelled before the round started.
            if self._waiting.get(session, (None, None))[1] is answer:
                del self._waiting[session]

    async def aclose(self) -> None:
        """Cancel the current round and close the connections."""
        if self._round is not None:
            self._round.cancel()
            await asyncio.gather(self._round, return_exceptions=True)
        for engine in self._engines:
            await engine.aclose()

    def _start_if_complete(self) -> None:
        num_active = min(self._at_once, len(self._open))
        if self._round is None and self._waiting and len(self._waiting) == num_active:
            batch = [self._waiting[session] for session in sorted(self._waiting)]
            self._waiting = {}
            self._round = asyncio.get_running_loop().create_task(self._run_round(batch))

    async def _run_round(self, batch: list[tuple[GenerateRequest, asyncio.Future[GenerateResult]]]) -> None:
        try:
            by_engine: dict[int, list[tuple[GenerateRequest, asyncio.Future[GenerateResult]]]] = defaultdict(list)
            for request, answer in batch:
                by_engine[self._assign(request.session_id)].append((request, answer))
            calls = [
                self._answers(self._engines[index], [request for request, _ in asked])
                for index, asked in sorted(by_engine.items())
            ]
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            for (_, asked), outcome in zip(sorted(by_engine.items()), outcomes, strict=True):
                _set_results([answer for _, answer in asked], outcome)
        finally:
            self._round = None
            for _, answer in batch:
                answer.cancel()
        self._start_if_complete()

    async def _answers(self, engine: SglangEngine, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        """The answers to requests in one call; the deadline is the latest of theirs."""
        name, timeout_s = f"session {requests[0].session_id}", max(request.timeout_s for request in requests)
        results, attempts = await answered(name, timeout_s, lambda: engine.generate_batch(requests))
        return [replace(result, num_retries=attempts) for result in results]

    def _assign(self, session: str) -> int:
        if session not in self._engine_of:
            loads = Counter(self._engine_of.values())
            self._engine_of[session] = min(range(len(self._engines)), key=lambda index: loads[index])
        return self._engine_of[session]


def _set_results(answers: list[asyncio.Future[GenerateResult]], outcome: list[GenerateResult] | BaseException) -> None:
    for index, answer in enumerate(answers):
        if answer.done():
            continue
        if isinstance(outcome, EngineError):
            # One exception object per waiter, since each raise appends to its traceback.
            answer.set_exception(EngineError(str(outcome)))
        elif isinstance(outcome, BaseException):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome[index])
