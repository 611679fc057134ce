"""Watches how full the engines' KV caches are, and adapts to it how many trajectories run.

While trajectories run, each engine is asked for its state every POLL_S. One that does not answer, because it ends,
starts or loads weights, is left out of that round. With `rollout.adaptive_concurrency` the answers decide how many
trajectories may run (concurrency.py); without it they are counted alone.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import aiohttp

from slimrl.config.schema.rollout import RolloutConfig
from slimrl.engines.engine_key import EngineKey
from slimrl.engines.plugin import scheduler
from slimrl.rollout.adaptive_concurrency import AdaptiveConcurrency
from slimrl.rollout.slots import Slots

POLL_S, TIMEOUT_S = 2.0, 5.0

log = logging.getLogger(__name__)


class CachePressure:
    """Watches the engines' caches and makes the slots of trajectories; but for `take`, used on one event loop.

    Args:
        urls: of the engines that there are now.
        key: of these engines; None where there are none.
    """

    def __init__(self, rollout: RolloutConfig, urls: Callable[[], Sequence[str]], key: EngineKey | None = None) -> None:
        self._most = rollout.max_concurrency_per_engine * rollout.most_engines
        self._adaptive = (
            AdaptiveConcurrency(most=self._most, least=rollout.num_engines) if rollout.adaptive_concurrency else None
        )
        self._urls, self._headers = urls, {} if key is None else key.headers
        self._slots = WeakSet[Slots]()
        self._counts: dict[str, int] = {}
        """Number of retractions of each engine since it started, as it last reported"""
        self._retractions = 0
        self._usages: list[float] = []
        self.load: dict[str, float] = {}
        """The engines' `requests` under way, and the `usage` of the fullest cache, as last seen; empty while no
        trajectory runs. A new object each time."""

    def slots(self) -> Slots:
        """New slots, whose number adapts as long as they are used."""
        made = Slots(self._most if self._adaptive is None else self._adaptive.limit)
        self._slots.add(made)
        return made

    def take(self) -> dict[str, float]:
        """Metrics since the last call; none if no engine has answered since."""
        if not self._usages:
            return {}
        metrics = {"rollout/retractions": self._retractions, "rollout/token_usage_max": max(self._usages)}
        if self._adaptive is not None:
            metrics["rollout/concurrency_limit"] = self._adaptive.limit
        self._retractions, self._usages = 0, []
        return metrics

    async def watch(self) -> None:
        """Ask and adapt until it is cancelled."""
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout, headers=self._headers) as http:
            while True:
                await asyncio.sleep(POLL_S)
                if not any(slots.taken for slots in self._slots):
                    # The trainer may have the memory of the engines.
                    self.load = {}
                    continue
                urls = list(self._urls())
                states = await asyncio.gather(*(_states(http, url) for url in urls))
                self.observe(dict(zip(urls, states, strict=True)))

    def observe(self, states: dict[str, list[dict[str, Any]]]) -> None:
        """
        Args:
            states: of each engine's schedulers, by the engine's url; none for an engine that did not answer.
        """
        retractions, usages = 0, []
        for url, of_engine in states.items():
            if not of_engine:
                continue
            count = sum(state[scheduler.RETRACTIONS] for state in of_engine)
            before = self._counts.get(url, 0)
            # A new engine at the same address counts from 0.
            retractions += count - before if count >= before else count
            self._counts[url] = count
            usages += [state[scheduler.TOKEN_USAGE] for state in of_engine]
        if not usages:
            return
        requests = sum(state[scheduler.RUNNING_REQUESTS] for of_engine in states.values() for state in of_engine)
        self.load = {"requests": requests, "usage": max(usages)}
        self._retractions += retractions
        self._usages.append(max(usages))
        if self._adaptive is not None:
            running = sum(slots.taken for slots in self._slots)
            ended = sum(slots.take_num_ended() for slots in self._slots)
            limit = self._adaptive.observe(running=running, ended=ended, retractions=retractions, usage=max(usages))
            for slots in self._slots:
                slots.limit = limit


async def _states(http: aiohttp.ClientSession, url: str) -> list[dict[str, Any]]:
    """The state of each of an engine's schedulers; none if it does not answer."""
    try:
        async with http.get(f"{url}/server_info") as response:
            response.raise_for_status()
            return (await response.json())["internal_states"]
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
        log.debug("%s does not say how full its cache is: %s %s", url, type(error).__name__, error)
        return []
