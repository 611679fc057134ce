"""Turns that begin at the same moment go to their engine in one request, which answers each of them when it ends.

The engine's HTTP server, and the client's connections, take as much time for a request of many turns as for one.
A turn that begins alone has a request of its own. So has each that is left without an answer since the engine refused
one of its request: it then succeeds or fails by itself.
"""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from slimrl.data.engine import EngineError, EngineUnreachable, GenerateRequest, GenerateResult

MOST_TURNS = 64
"""In one request: at each answer SGLang looks through all turns of it."""

log = logging.getLogger(__name__)

Alone = Callable[[GenerateRequest], Awaitable[GenerateResult]]
Ended = tuple[int, GenerateResult | None]
Together = Callable[[Sequence[GenerateRequest], Sequence[str], int | None], AsyncIterator[Ended]]
Abort = Callable[[Sequence[str]], None]


@dataclass(eq=False)
class _Turn:
    request: GenerateRequest
    rid: str = field(default_factory=lambda: uuid.uuid4().hex)
    is_sent: bool = False
    answer: asyncio.Future[GenerateResult | None] = field(default_factory=asyncio.Future)
    """None: it is to be sent alone"""


class TurnBatches:
    """Of one engine; belongs to the event loop that first uses it.

    Args:
        alone: sends one turn.
        together: sends turns under their ids, to a group of the engine's ranks or to any, and yields the index and
            the result of each when it has ended, None where the engine refused it; raises EngineError.
        abort: ends turns at the engine, by their ids, without waiting for it.
        retries: `alone` retries where the engine cannot be reached; else all turns of a request fail with it.
    """

    def __init__(self, alone: Alone, together: Together, abort: Abort, *, retries: bool) -> None:
        self._alone, self._together, self._abort, self._retries = alone, together, abort, retries
        self._waiting: dict[int | None, list[_Turn]] = {}
        self._streams: set[asyncio.Task[None]] = set()

    async def generate(self, request: GenerateRequest, group: int | None) -> GenerateResult:
        """One turn.

        Args:
            group: of the engine's ranks, to serve it; None for any.

        Raises:
            EngineError: what `alone` raises, or there was no answer before the deadline.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + request.timeout_s
        turn = _Turn(request)
        waiting = self._waiting.setdefault(group, [])
        waiting.append(turn)
        if len(waiting) == MOST_TURNS:
            self._send(group)
        elif len(waiting) == 1:
            loop.call_soon(self._send, group)
        try:
            async with asyncio.timeout(request.timeout_s):
                result = await turn.answer
        except (TimeoutError, asyncio.CancelledError) as error:
            if turn.is_sent:
                self._abort([turn.rid])
            if isinstance(error, TimeoutError):
                timeout_s = round(request.timeout_s, 2)
                raise EngineError(f"session {request.session_id}: no answer within {timeout_s:g} s") from error
            raise
        if result is not None:
            return result
        result = await self._alone(replace(request, timeout_s=deadline - loop.time()))
        return replace(result, num_retries=result.num_retries + turn.is_sent)

    async def aclose(self) -> None:
        for stream in self._streams:
            stream.cancel()
        await asyncio.gather(*self._streams, return_exceptions=True)

    def _send(self, group: int | None) -> None:
        turns = [turn for turn in self._waiting.pop(group, []) if not turn.answer.done()]
        if len(turns) == 1:
            turns[0].answer.set_result(None)
        elif turns:
            stream = asyncio.get_running_loop().create_task(self._stream(turns, group))
            self._streams.add(stream)
            stream.add_done_callback(self._streams.discard)

            def end_if_unwanted(answer: asyncio.Future[GenerateResult | None]) -> None:
                if answer.cancelled() and all(turn.answer.done() for turn in turns):
                    stream.cancel()

            for turn in turns:
                turn.is_sent = True
                turn.answer.add_done_callback(end_if_unwanted)

    async def _stream(self, turns: Sequence[_Turn], group: int | None) -> None:
        failure: EngineUnreachable | None = None
        try:
            requests, rids = [turn.request for turn in turns], [turn.rid for turn in turns]
            async for index, result in self._together(requests, rids, group):
                if not (answer := turns[index].answer).done():
                    answer.set_result(result)
        except EngineError as error:
            if isinstance(error, EngineUnreachable) and not self._retries:
                failure = error
                return
            log.warning("%s: %d turns are sent one by one", error, sum(not turn.answer.done() for turn in turns))
        finally:
            if left := [turn for turn in turns if not turn.answer.done()]:
                self._abort([turn.rid for turn in left])
            for turn in left:
                if failure is None:
                    turn.answer.set_result(None)
                else:
                    turn.answer.set_exception(type(failure)(str(failure)))
