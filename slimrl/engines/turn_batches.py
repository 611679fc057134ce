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
from itertools import chain

from slimrl.data.engine import EngineError, EngineUnreachable, GenerateRequest, GenerateResult

MOST_TURNS = 64
"""Most turns in one request: at each answer SGLang looks through all of them."""

log = logging.getLogger(__name__)

Alone = Callable[[GenerateRequest], Awaitable[GenerateResult]]
Kind = tuple[int | None, int]
"""Common properties of the turns of a request: the group of the engine's ranks that is to serve them, None for any, and
the first token whose experts are asked for"""
Ended = tuple[int, Callable[[], GenerateResult] | None]
Together = Callable[[Sequence[GenerateRequest], Sequence[str], Kind], AsyncIterator[Ended]]
Abort = Callable[[Sequence[str]], None]


@dataclass(eq=False)
class _Turn:
    request: GenerateRequest
    rid: str = field(default_factory=lambda: uuid.uuid4().hex)
    is_sent: bool = False
    answer: asyncio.Future[GenerateResult | None] = field(default_factory=asyncio.Future)
    """Result of the turn; None if it is to be sent alone"""


class TurnBatches:
    """Joins the turns for one engine into requests; belongs to the event loop that first uses it.

    Args:
        alone: sends one turn.
        together: sends turns of a kind under their ids, and yields of each when it has ended the index and what
            reads its result, None where the engine refused it; raises EngineError.
        abort: ends turns at the engine, by their ids, without waiting for it.
    """

    def __init__(self, alone: Alone, together: Together, abort: Abort) -> None:
        self._alone, self._together, self._abort = alone, together, abort
        self._waiting: dict[Kind, list[_Turn]] = {}
        self._streams: dict[asyncio.Task[None], list[_Turn]] = {}

    async def generate(self, request: GenerateRequest, kind: Kind) -> GenerateResult:
        """Sample one turn.

        Raises:
            EngineError: what `alone` raises. Where the engine cannot be reached, all turns of a request fail with it.
        """
        turn = _Turn(request)
        waiting = self._waiting.setdefault(kind, [])
        waiting.append(turn)
        if len(waiting) == MOST_TURNS:
            self._send(kind)
        elif len(waiting) == 1:
            asyncio.get_running_loop().call_soon(self._send, kind)
        try:
            result = await turn.answer
        except asyncio.CancelledError:
            if turn.is_sent:
                self._abort([turn.rid])
            raise
        if result is not None:
            return result
        result = await self._alone(request)
        return replace(result, num_retries=result.num_retries + turn.is_sent)

    async def aclose(self) -> None:
        """End what runs; turns that still wait are cancelled."""
        streams = [*self._streams]
        for turn in chain(*self._waiting.values(), *self._streams.values()):
            turn.answer.cancel()
        await asyncio.gather(*streams, return_exceptions=True)

    def _send(self, kind: Kind) -> None:
        turns = [turn for turn in self._waiting.pop(kind, []) if not turn.answer.done()]
        if len(turns) == 1:
            turns[0].answer.set_result(None)
        elif turns:
            stream = asyncio.get_running_loop().create_task(self._stream(turns, kind))
            self._streams[stream] = turns
            stream.add_done_callback(self._streams.pop)

            def end_if_unwanted(answer: asyncio.Future[GenerateResult | None]) -> None:
                # An abort may have come too early to have an effect, and only the end of the connection is left.
                if all(turn.answer.done() for turn in turns) and any(turn.answer.cancelled() for turn in turns):
                    stream.cancel()

            for turn in turns:
                turn.is_sent = True
                turn.answer.add_done_callback(end_if_unwanted)

    async def _stream(self, turns: Sequence[_Turn], kind: Kind) -> None:
        failure: EngineUnreachable | None = None
        try:
            requests, rids = [turn.request for turn in turns], [turn.rid for turn in turns]
            async for index, read in self._together(requests, rids, kind):
                if (answer := turns[index].answer).done():
                    continue
                try:
                    answer.set_result(None if read is None else read())
                except EngineError as error:
                    answer.set_exception(error)
        except EngineError as error:
            if isinstance(error, EngineUnreachable):
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
