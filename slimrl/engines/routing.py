"""Several engines as one: each request goes to the engine that `engine_choice.py` says.

1. `use` says which engines may serve. Requests that run on one that left are cancelled there and sent to another; if
   none is there they wait.
2. An engine that cannot be reached, or whose connection breaks before the answer, is avoided for AVOID_S or until
   `use` is called again. The request is sent to another at once, or again after a while if all are avoided: a few
   times, but until its deadline where it has reached none.
3. Engines may be set aside for evaluations, whose sessions then go to these alone.
4. All of that is within the deadline of the request. No token of a failed attempt is used, and the next attempt has
   the same seed.
"""

import asyncio
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from slimrl.data.engine import (
    Engine,
    EngineAbsent,
    EngineError,
    EngineUnreachable,
    GenerateRequest,
    GenerateResult,
    Scorer,
    ScoreRequest,
)
from slimrl.engines.engine_choice import EngineChoice

RETRY_DELAYS_S = (0.2, 1.0, 3.0)
"""Delays before the further attempts of a request that every available engine has failed."""
AVOID_S = 10.0
"""Seconds for which an engine is avoided."""
EVALUATION = "eval_"
"""Beginning of the ids of evaluations' sessions."""

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
            evaluating: those that serve the sessions of evaluations (EVALUATION) and no others; None for `urls`.
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
        loop = asyncio.get_running_loop()
        deadline = loop.time() + request.timeout_s
        failures = moves = 0
        while True:
            choice = self._choice_of(request.session_id)
            url = choice.begin(request)
            if url is None:
                await self._change(request, deadline - loop.time())
                continue
            try:
                part = replace(request, timeout_s=deadline - loop.time())
                result = await self._answer(url, part, choice)
            except EngineUnreachable as error:
                is_news = self._avoid(url)
                if isinstance(error, EngineAbsent) and not choice.has_others:
                    # It is no fault of the request, and the run replaces its engines.
                    delay_s = RETRY_DELAYS_S[-1]
                    if loop.time() + delay_s > deadline:
                        raise
                elif failures == len(RETRY_DELAYS_S):
                    raise
                else:
                    delay_s = 0.0 if choice.has_others else RETRY_DELAYS_S[failures]
                    failures += 1
                # An engine that ends fails many requests at once.
                level = logging.WARNING if is_news else logging.DEBUG
                log.log(level, "%s: sent again in %g s (once for all requests that fail there)", error, delay_s)
                await asyncio.sleep(delay_s)
                continue
            if result is None:
                moves += 1
                log.info("%s has left: session %s goes on elsewhere", url, request.session_id)
                continue
            return replace(result, num_retries=result.num_retries + failures + moves)

    async def score(self, request: ScoreRequest) -> np.ndarray:
        """Score tokens; see Scorer.score. The engines serve in turn, and the next one where one leaves or cannot be
        reached.

        Raises:
            EngineError: an engine refused it, or there was no answer before the deadline.
        """
        self._attach()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + request.timeout_s
        while True:
            if not (live := self.live):
                await self._change(request, deadline - loop.time())
                continue
            self._num_scored += 1
            url = live[self._num_scored % len(live)]
            part = replace(request, timeout_s=deadline - loop.time())
            try:
                scores = await self._unless_it_leaves(url, self._client(url).score(part))
            except EngineUnreachable:
                if loop.time() + RETRY_DELAYS_S[0] > deadline:
                    raise
                await asyncio.sleep(RETRY_DELAYS_S[0])
                continue
            if scores is not None:
                return scores

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
        is_set_aside = self._evaluating is not None and session_id.startswith(EVALUATION)
        return self._of_evaluations if is_set_aside else self._choice

    async def _answer(self, url: str, request: GenerateRequest, choice: EngineChoice) -> GenerateResult | None:
        """The answer of an engine on which the request has begun, or None if the engine leaves before."""
        try:
            return await self._unless_it_leaves(url, self._client(url).generate(request))
        finally:
            choice.end(url, request)

    async def _unless_it_leaves[T](self, url: str, answer: Coroutine[Any, Any, T]) -> T | None:
        """The answer of an engine, or None if the engine leaves before."""
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
            return None

    def _client(self, url: str) -> ScoringEngine:
        if url not in self._clients:
            self._clients[url] = self._connect(url)
        return self._clients[url]

    async def _change(self, request: GenerateRequest | ScoreRequest, timeout_s: float) -> None:
        """Wait for another `use`; raises EngineError at the deadline."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError as error:
            raise EngineError(
                f"session {request.session_id}: no engine became available within {request.timeout_s:g} s"
            ) from error

    def _avoid(self, url: str) -> bool:
        """Avoid an engine from now on; whether it was not avoided before."""
        if url in self._choice.avoided:
            return False
        for choice in (self._choice, self._of_evaluations):
            choice.avoid(url)
            asyncio.get_running_loop().call_later(AVOID_S, choice.forgive, url)
        return True
