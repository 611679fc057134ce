"""A stage whose episodes take no time, for tests of what rollouts ask for and keep."""

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from slimrl.base.errors import StepDropped
from slimrl.base.loop_thread import LoopThread
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import ENDED_AT, STARTED_AT, Segment, Status, Trajectory
from slimrl.engines.teacher import ScoringTimes
from slimrl.rollout.groups import Group
from slimrl.rollout.pressure import CachePressure

COUNTS = {"num_turns": 1, "num_tool_calls": 0, "num_tool_errors": 0, "num_malformed_calls": 0, "num_retries": 0}


class InstantStage:
    """Its rewards follow from the prompt and the trajectory's id alone. Used in a `with` block."""

    def __init__(self, reward: Callable[[Prompt, str], float], dropped_in: str = "") -> None:
        """
        Args:
            dropped_in: begin of the ids of a rollout which does not end, in which `check` drops the step.
        """
        self.reward, self.dropped_in = reward, dropped_in
        self.pressure = CachePressure(RolloutConfig(), lambda: ())
        self.asked: list[tuple[str, list[str]]] = []
        """The begin of the ids of each rollout, and its prompts"""
        self.cancelled: list[str] = []
        self.flushed: list[int] = []
        """Number of rollouts before each flush of the engines' caches"""

    def __enter__(self) -> "InstantStage":
        self._loop = LoopThread("slimrl-rollout")
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.close()

    def run(self, coroutine):
        return self._loop.run(coroutine)

    def flush_if_deterministic(self) -> None:
        self.flushed.append(len(self.asked))

    def check(self) -> None:
        if self.dropped_in and self.asked[-1][0] == self.dropped_in:
            raise StepDropped

    def take_lags(self) -> list[float]:
        return []

    def take_scoring(self) -> ScoringTimes:
        return ScoringTimes()

    async def run_groups(self, groups: Sequence[Group], slots, kept, ended, saved) -> None:
        label = groups[0].ids[0].rsplit("/", 2)[0]
        self.asked.append((label, [group.prompt.prompt_id for group in groups]))
        if label == self.dropped_in:
            try:
                await asyncio.sleep(60)
            finally:
                self.cancelled.append(label)
        for group in reversed(groups):
            for trajectory_id in group.ids:
                group.keep(self._answer(group.prompt, trajectory_id))
            ended(group)

    def _answer(self, prompt: Prompt, name: str) -> Trajectory:
        segment = Segment(
            tokens=np.zeros(2, np.int32), loss_mask=np.array([False, True]),
            rollout_logprobs=np.zeros(2, np.float32), weight_versions=np.zeros(2, np.int32),
            turn_ids=np.array([-1, 0], np.int16),
        )  # fmt: skip
        return Trajectory(
            group_id=prompt.prompt_id, trajectory_id=name, segments=[segment], status=Status.completed,
            reward=self.reward(prompt, name), metadata=dict(COUNTS), measured={STARTED_AT: 3.0, ENDED_AT: 4.0},
        )  # fmt: skip
