"""Several engines as one: each request goes to the engine that `load_balancing.py` says.

1. `use` says which engines may serve. Requests that run on one that left are cancelled there and sent to another; if
   none is there they wait.
2. An engine that cannot be reached, or whose connection breaks before the answer, is avoided for AVOID_S or until
   `use` is called again, and the request is sent again (retries.py): until its deadline where it has reached none.
3. Engines may be set aside for evaluations, whose sessions then go to these alone.
"""

import asyncio
import logging
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Coroutine
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from slimrl.data.engine import (
    RUN_EVALUATION,
    Engine,
    EngineUnreachable,
    GenerateRequest,
    GenerateResult,
    Scorer,
    ScoreRequest,
)
from slimrl.engines.load_balancing import EngineChoice
from slimrl.engines.retries import answered

AVOID_S = 10.0
"""Seconds for which an engine is avoided."""

log = logging.getLogger(__name__)


class ScoringEngine(Engine, Scorer, Protocol):
    """The client of an engine that samples and scores."""


class RoutedEngines(Engine):
    """Belongs to the event loop that first uses it, but for `use`, `live` and `follow`. Can be pickled before that.

    Args:
        connect: makes the client of the engine at an address, which raises EngineUnreachable at its first failure.
    """

    def __init__(self, connect: Callable[[str], ScoringEngine], urls: Collection[str] = ()) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        """Lock of what `use` changes: the three attributes below"""
        self._live = tuple(dict.fromkeys(urls))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._followers: list[Callable[[], None]] = []
        self._evaluating: tuple[str, ...] | None = None
        """Addresses of the engines that serve the sessions of evaluations; None if these go to all engines"""
        self._choice, self._of_evaluations = EngineChoice(), EngineChoice()
        self._clients: dict[str, ScoringEngine] = {}
        self._num_scored = 0
        self._attempts: defaultdict[str, set[asyncio.Timeout]] = defaultdict(set)
        """Timeout scopes of the running requests, by engine"""
        self._changed = asyncio.Event()

    def __reduce__(self) -> tuple[type["RoutedEngines"], tuple[Any, ...]]:
        return RoutedEngines, (self._connect, self.live)

    @property
    def live(self) -> tuple[str, ...]:
        """Addresses of the engines that may serve, without those set aside."""
        with self._lock:
            return self._live

    @property
    def in_use(self) -> tuple[tuple[str, ...], tuple[str, ...] | None]:
        """The arguments of the last `use`."""
        with self._lock:
            return self._live, self._evaluating

    def use(self, urls: Collection[str], evaluating: Collection[str] | None = None) -> None:
        """The engines that may serve from now on; from any thread.

        An engine that was there before may be named again, at the same address, after it was replaced.

        Args:
            evaluating: those that serve the sessions of evaluations (RUN_EVALUATION) and no others; None for `urls`.
        """
        with self._lock:
            self._live = tuple(dict.fromkeys(urls))
            self._evaluating = None if evaluating is None else tuple(dict.fromkeys(evaluating))
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._apply)
            followers = list(self._followers)
        for follower in followers:
            follower()

    def follow(self, follower: Callable[[], None]) -> None:
        """Call a function after each `use`, in its thread: for copies in other processes."""
        with self._lock:
            self._followers.append(follower)

    def close(self, session_id: str) -> None:
        self._choice_of(session_id).close(session_id)
        for client in self._clients.values():
            client.close(session_id)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample one turn on the engine that EngineChoice says, and on another one where that fails.

        Raises:
            EngineError: an engine refused it, too many attempts failed, or there was no answer before the deadline.
        """
        self._attach()
        choice = self._choice_of(request.session_id)

        async def attempt() -> GenerateResult | None:
            url = choice.begin(request)
            assert url is not None
            try:
                return await self._answer(url, request.session_id, self._client(url).generate(request))
            finally:
                choice.end(url, request)

        result, attempts = await self._answered(request, choice, attempt)
        return replace(result, num_retries=result.num_retries + attempts)

    async def score(self, request: ScoreRequest) -> np.ndarray:
        """Score tokens; see Scorer.score. The engines serve in turn.

        Raises:
            EngineError: as `generate`.
        """
        self._attach()

        async def attempt() -> np.ndarray | None:
            self._num_scored += 1
            url = self._choice.usable[self._num_scored % len(self._choice.usable)]
            return await self._answer(url, request.session_id, self._client(url).score(request))

        return (await self._answered(request, self._choice, attempt))[0]

    async def aclose(self) -> None:
        with self._lock:
            self._loop = None
        for client in self._clients.values():
            await client.aclose()

    def _attach(self) -> None:
        with self._lock:
            if self._loop is not None:
                return
            self._loop = asyncio.get_running_loop()
        self._apply()

    def _apply(self) -> None:
        with self._lock:
            live, evaluating = self._live, self._evaluating
        self._choice.use(live)
        self._of_evaluations.use(live if evaluating is None else evaluating)
        for url in self._attempts.keys() - {*live, *(evaluating or ())}:
            for attempt in self._attempts.pop(url):
                attempt.reschedule(0)
        self._changed.set()
        self._changed = asyncio.Event()

    def _choice_of(self, session_id: str) -> EngineChoice:
        is_set_aside = self._evaluating is not None and session_id.startswith(RUN_EVALUATION)
        return self._of_evaluations if is_set_aside else self._choice

    async def _answered[T](
        self, request: GenerateRequest | ScoreRequest, choice: EngineChoice, attempt: Callable[[], Awaitable[T | None]]
    ) -> tuple[T, int]:
        async def ready() -> None:
            while not choice.live:
                await self._changed.wait()

        return await answered(
            f"session {request.session_id}",
            request.timeout_s,
            attempt,
            ready=ready,
            has_others=lambda: choice.has_others,
            waits_for_absent=True,
        )

    async def _answer[T](self, url: str, session_id: str, answer: Coroutine[Any, Any, T]) -> T | None:
        """The answer of an engine, or None if the engine leaves before. One that cannot be reached is avoided."""
        attempt = asyncio.timeout(None)
        try:
            async with attempt:
                self._attempts[url].add(attempt)
                try:
                    return await answer
                finally:
                    self._attempts[url].discard(attempt)
        except TimeoutError:
            if not attempt.expired():
                raise
            log.info("%s has left: session %s goes on elsewhere", url, session_id)
            return None
        except EngineUnreachable as error:
            self._avoid(url, error)
            raise

    def _client(self, url: str) -> ScoringEngine:
        if url not in self._clients:
            self._clients[url] = self._connect(url)
        return self._clients[url]

    def _avoid(self, url: str, cause: EngineUnreachable) -> None:
        """Avoid an engine from now on."""
        if url in self._choice.avoided:
            return
        # An engine that ends fails many requests at once.
        log.warning("%s: avoided for %g s (said once for all requests that fail there)", cause, AVOID_S)
        for choice in (self._choice, self._of_evaluations):
            choice.avoid(url)
            asyncio.get_running_loop().call_later(AVOID_S, choice.forgive, url)
