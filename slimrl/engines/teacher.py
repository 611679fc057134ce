"""A teacher: engines that score the tokens which the policy sampled.

Each segment of a trajectory is one request, from its first sampled token on. An engine has a fixed number of slots, and
a request takes the slot that has been free for longest, so engines that answer faster score more. A request that fails
while an engine is restarted is asked again when that is back.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from slimrl.data.engine import EngineError, Scorer, ScoreRequest
from slimrl.data.trajectory import Segment, Trajectory
from slimrl.engines.retries import answered

RESTART_POLL_S = 0.5


@dataclass(kw_only=True)
class ScoringTimes:
    """Times of the teacher's scores in a rollout, in seconds."""

    scores_s: list[float] = field(default_factory=list)
    """Duration of each score of a trajectory, the wait for free slots included"""
    tails_s: list[float] = field(default_factory=list)
    """Tail of each rollout, or of each group that runs by itself: from the end of its last episode to its last score"""


class Teacher:
    """The teacher's engines, which score trajectories. One per event loop."""

    def __init__(
        self,
        engines: Sequence[Scorer],
        *,
        slots_per_engine: int,
        timeout_s: float,
        is_restarting: Callable[[], bool] = lambda: False,
        restart_timeout_s: float = 0.0,
    ) -> None:
        """
        Args:
            slots_per_engine: requests that an engine serves at a time.
            timeout_s: deadline of a request, once it has a slot.
            is_restarting: whether an engine has ended and is being started again.
            restart_timeout_s: how long a request that failed meanwhile waits for that.
        """
        self._engines, self._timeout_s = list(engines), timeout_s
        self._is_restarting, self._restart_timeout_s = is_restarting, restart_timeout_s
        self._slots: asyncio.Queue[Scorer] = asyncio.Queue()
        for _ in range(slots_per_engine):
            for engine in self._engines:
                self._slots.put_nowait(engine)

    async def score(self, trajectory: Trajectory) -> None:
        """Set `teacher_logprobs` of all segments, at once, or of none.

        Raises:
            EngineError: an engine refused, ended, or missed the deadline.
        """
        names = [f"{trajectory.trajectory_id}, segment {number}" for number in range(len(trajectory.segments))]
        asked = [self._score(name, segment) for name, segment in zip(names, trajectory.segments, strict=True)]
        found = await asyncio.gather(*asked, return_exceptions=True)
        for result in found:
            if isinstance(result, BaseException):
                raise result
        for segment, logprobs_T in zip(trajectory.segments, found, strict=True):
            assert isinstance(logprobs_T, np.ndarray)
            segment.teacher_logprobs = logprobs_T

    async def _score(self, name: str, segment: Segment) -> np.ndarray:
        """float32 [T], the teacher's log-probs of a segment's sampled tokens; 0 elsewhere."""
        logprobs_T = np.zeros(len(segment), np.float32)
        sampled = np.flatnonzero(segment.loss_mask)
        if not len(sampled):
            return logprobs_T
        first, end = int(sampled[0]), int(sampled[-1]) + 1
        if first == 0:
            raise EngineError(f"{name}: its first token was sampled, and nothing comes before it")
        tokens = segment.tokens[:end].tolist()
        request = ScoreRequest(session_id=name, tokens=tokens, start=first, timeout_s=self._timeout_s)
        logprobs_T[first:end] = await self._answer(request)
        return np.where(segment.loss_mask, logprobs_T, 0)

    async def _answer(self, request: ScoreRequest) -> np.ndarray:
        while True:
            engine = await self._slots.get()
            try:
                scores, _ = await answered(request.session_id, self._timeout_s, partial(engine.score, request))
                return scores
            except EngineError as error:
                if not self._is_restarting():
                    raise
                await self._restarted(error)
            finally:
                self._slots.put_nowait(engine)

    async def _restarted(self, failure: EngineError) -> None:
        """Wait for the engine that is started again; raises EngineError if it takes too long."""
        try:
            async with asyncio.timeout(self._restart_timeout_s):
                while self._is_restarting():
                    await asyncio.sleep(RESTART_POLL_S)
        except TimeoutError:
            raise EngineError(f"{failure}; it was not restarted within {self._restart_timeout_s:g} s") from failure

    async def aclose(self) -> None:
        """Close the connections."""
        for engine in self._engines:
            await engine.aclose()
