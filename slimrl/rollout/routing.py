"""Several engines as one: which of them serves a request, and what becomes of one whose engine is gone.

1. A session stays on the engine that has its tokens in its cache, and the sessions of a group share the engine that has
   their prompt. One that is far busier than the least busy gives the request to that one instead.
2. The run says which engines may serve (`use`). A request that waits for one of the others goes on elsewhere at once,
   and a request for which there is no engine waits for one until its deadline.
3. An engine that cannot be reached is left out for a while, and the request goes to another.

A router in front of the engines could do the first alone: it does not know of requests that have to leave an engine
which has stopped to answer, or of one that is to evaluate.
"""

import asyncio
import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from slimrl.data.engine import Engine, EngineError, EngineUnreachable, GenerateRequest, GenerateResult

SPARE_REQUESTS = 8
"""An engine keeps a session while it has at most so many requests more than the least busy engine, or SPARE_SHARE."""
SPARE_SHARE = 0.5
"""The same as a share of the least busy engine's requests."""
MOST_GROUPS = 10_000
"""Of which the engine of the prompt is remembered."""
AVOIDED_S = 5.0
"""How long an engine that could not be reached gets no request, unless there is no other."""
RETRY_DELAYS_S = (0.2, 1.0, 3.0)
"""Before each attempt but the first at an engine that has failed the request already."""
EVALUATION = "eval_"
"""With what the sessions of evaluations begin."""

log = logging.getLogger(__name__)


class Routes:
    """The choice alone; has neither clock nor connections."""

    def __init__(self) -> None:
        self.running: Counter[str] = Counter()
        """Requests of each engine"""
        self._of_session: dict[str, str] = {}
        self._of_group: OrderedDict[str, str] = OrderedDict()

    def choose(self, session: str, engines: Collection[str]) -> str:
        """The engine, of those given, for the next request of a session."""
        least_busy = min(engines, key=lambda engine: (self.running[engine], engine))
        least = self.running[least_busy]
        most = least + max(SPARE_REQUESTS, SPARE_SHARE * least)
        group = _group(session)
        for known in (self._of_session.get(session), self._of_group.get(group)):
            if known in engines and self.running[known] <= most:
                chosen = known
                break
        else:
            chosen = least_busy
        self._of_session[session] = self._of_group[group] = chosen
        self._of_group.move_to_end(group)
        if len(self._of_group) > MOST_GROUPS:
            self._of_group.popitem(last=False)
        return chosen

    def begin(self, engine: str) -> None:
        self.running[engine] += 1

    def end(self, engine: str) -> None:
        self.running[engine] -= 1

    def close(self, session: str) -> str | None:
        """Forget a session that has ended; its last engine."""
        return self._of_session.pop(session, None)


def _group(session: str) -> str:
    """The sessions of a prompt differ in what follows the last slash."""
    return session.rpartition("/")[0]


class RoutedEngines(Engine):
    """One per event loop; copies in other processes follow by `followers`."""

    def __init__(self, connect: Callable[[str], Engine], urls: Collection[str]) -> None:
        """
        Args:
            connect: makes the client of an engine, which does not try a request again.
            urls: of all engines.
        """
        self._connect = connect
        self._clients: dict[str, Engine] = {}
        self._routes = Routes()
        self._avoided: dict[str, float] = {}
        """Until when on the event loop's clock"""
        self._waiting: dict[str, set[asyncio.Task[GenerateResult]]] = {}
        """Of each engine, requests under way"""
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()
        self._serving = tuple(urls)
        self._evaluating: tuple[str, ...] | None = None
        self.followers: list[Callable[[Collection[str], Collection[str] | None], None]] = []
        """Called with the arguments of `use`"""

    def __getstate__(self) -> Mapping[str, Any]:
        """What a copy in another process begins with; it has connected to nothing."""
        return {"connect": self._connect, "serving": self._serving, "evaluating": self._evaluating}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__(state["connect"], ())  # type: ignore[misc]
        self._serving, self._evaluating = state["serving"], state["evaluating"]

    def use(self, serving: Collection[str], evaluating: Collection[str] | None = None) -> None:
        """Say which engines serve from now on; may be called on any thread.

        Args:
            evaluating: those that serve the sessions of evaluations, and no others; None if all that serve do.
        """
        with self._lock:
            self._serving, self._evaluating = tuple(serving), None if evaluating is None else tuple(evaluating)
            loop = self._loop
        for follow in self.followers:
            follow(serving, evaluating)
        if loop is not None:
            with suppress(RuntimeError):  # The loop was closed: nothing runs there.
                loop.call_soon_threadsafe(self._apply)

    def close(self, session_id: str) -> None:
        if (url := self._routes.close(session_id)) is not None and url in self._clients:
            self._clients[url].close(session_id)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Raises EngineError: an engine refused the request, or none answered it before its deadline."""
        if self._loop is None:
            with self._lock:
                self._loop = asyncio.get_running_loop()
        now = self._loop.time
        deadline = now() + request.timeout_s
        failed: Counter[str] = Counter()
        while True:
            url = await self._chosen(request.session_id, deadline, failed)
            try:
                result = await self._ask(url, replace(request, timeout_s=deadline - now()))
            except EngineUnreachable as error:
                failed[url] += 1
                if failed[url] > len(RETRY_DELAYS_S) or now() >= deadline:
                    raise
                log.warning("tried again: %s", error)
                self._avoided[url] = now() + AVOIDED_S
                continue
            self._avoided.pop(url, None)
            return replace(result, num_retries=result.num_retries + failed.total())

    async def aclose(self) -> None:
        for client in self._clients.values():
            await client.aclose()

    async def _chosen(self, session: str, deadline: float, failed: Counter[str]) -> str:
        """The engine for an attempt, after a wait if there is none or all have failed the request.

        Raises:
            EngineError: there is none before the deadline.
        """
        assert self._loop is not None
        try:
            async with asyncio.timeout_at(deadline):
                while not (engines := self._of(session)):
                    self._changed.clear()
                    await self._changed.wait()
                least = min(failed[url] for url in engines)
                if least:
                    await asyncio.sleep(RETRY_DELAYS_S[least - 1])
                    engines = self._of(session) or engines
        except TimeoutError as error:
            raise EngineError(f"session {session}: no engine serves before the request's deadline") from error
        least = min(failed[url] for url in engines)
        fresh = [url for url in engines if failed[url] == least]
        reached = [url for url in fresh if self._avoided.get(url, 0.0) <= self._loop.time()]
        return self._routes.choose(session, reached or fresh)

    def _of(self, session: str) -> tuple[str, ...]:
        """Engines that may serve a session."""
        if self._evaluating is not None and session.startswith(EVALUATION):
            return self._evaluating
        return self._serving

    async def _ask(self, url: str, request: GenerateRequest) -> GenerateResult:
        """Raises EngineUnreachable if the engine leaves meanwhile."""
        if url not in self._clients:
            self._clients[url] = self._connect(url)
        task = asyncio.ensure_future(self._clients[url].generate(request))
        self._waiting.setdefault(url, set()).add(task)
        self._routes.begin(url)
        try:
            return await task
        except asyncio.CancelledError:
            if url in self._of(request.session_id):
                raise
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            raise EngineUnreachable(f"{url} does not serve session {request.session_id} any more") from None
        finally:
            task.cancel()
            self._routes.end(url)
            self._waiting[url].discard(task)

    def _apply(self) -> None:
        """On the event loop: end requests at engines that left."""
        self._changed.set()
        for url in {*self._waiting} - {*self._serving, *(self._evaluating or ())}:
            for task in self._waiting[url]:
                task.cancel()
