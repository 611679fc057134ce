"""What the trajectories of a group have to do: turns of the model and of tools, drawn or recorded."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from slimrl.config.schema.rollout import RolloutConfig
from slimrl.estimates.simulator.distribution import Distribution, constant

DRAWN = 4096
"""Number of drawn trajectories from which means are estimated"""


@dataclass(frozen=True)
class Turn:
    tokens: float
    """Number of tokens that the model samples"""
    tool_s: float
    """Seconds of the tool's answer to the turn"""


@dataclass(frozen=True)
class GroupWork:
    trajectories: Sequence[Sequence[Turn]]
    end: str = "finished"
    """End of the group: `finished`, `filtered` or `failed`"""


class Workload(Protocol):
    def group(self, number: int) -> GroupWork:
        """The work of a group. Always the same for a number, so that all modes have the same work."""
        ...


@dataclass(frozen=True, kw_only=True)
class DrawnWorkload:
    """Work whose turns are drawn one by one: those of a trajectory, and trajectories of a group, are independent of
    each other."""

    samples: int
    """Number of trajectories of a group"""
    prompt_tokens: int
    """Number of tokens of a trajectory that are not sampled: prompt and tool results"""
    turns: Distribution
    turn_tokens: Distribution
    tool_s: Distribution
    """Seconds of a tool's answer, after each turn but the last"""
    rollout: RolloutConfig
    """Settings whose limits cut off what is drawn: max_turns, max_new_tokens, max_trajectory_tokens, tool_timeout_s"""
    seed: int

    def group(self, number: int) -> GroupWork:
        rng = random.Random(f"{self.seed} {number}")
        return GroupWork([self._trajectory(rng) for _ in range(self.samples)])

    def _trajectory(self, rng: random.Random) -> list[Turn]:
        rollout = self.rollout
        count = min(rollout.max_turns, max(1, round(self.turns.draw(rng))))
        room = rollout.max_trajectory_tokens - self.prompt_tokens
        turns: list[Turn] = []
        for number in range(count):
            tokens = min(room, rollout.sampling.max_new_tokens, max(1, round(self.turn_tokens.draw(rng))))
            room -= tokens
            is_last = number == count - 1 or room == 0
            tool_s = 0.0 if is_last else min(rollout.tool_timeout_s, self.tool_s.draw(rng))
            turns.append(Turn(tokens, tool_s))
            if is_last:
                break
        return turns

    def lengths(self) -> tuple[float, float]:
        """Mean tokens of a trajectory, and mean context of a token when it is sampled."""
        rng = random.Random(self.seed)
        sampled = np.array([sum(turn.tokens for turn in self._trajectory(rng)) for _ in range(DRAWN)])
        return (
            self.prompt_tokens + float(sampled.mean()),
            self.prompt_tokens + float((sampled**2).mean() / sampled.mean() / 2),
        )


def drawn_workload(
    rollout: RolloutConfig,
    *,
    turns: Distribution | None,
    turn_tokens: Distribution | None,
    tool_s: Distribution | None,
    prompt_tokens: int | None,
    seed: int,
) -> DrawnWorkload:
    """What is None is as in a plan: the longest trajectory that the recipe allows, in as many turns as it allows.

    Raises:
        ValueError: the prompt leaves no room for a sampled token.
    """
    longest = rollout.max_trajectory_tokens
    sampled = min(longest, rollout.max_turns * rollout.sampling.max_new_tokens)
    prompt = longest - sampled if prompt_tokens is None else prompt_tokens
    if not 0 <= prompt < longest:
        raise ValueError(
            f"--prompt-tokens {prompt}: must be at least 0 and below rollout.max_trajectory_tokens {longest:,}"
        )
    return DrawnWorkload(
        samples=rollout.samples_per_prompt,
        prompt_tokens=prompt,
        turns=turns or constant(rollout.max_turns),
        turn_tokens=turn_tokens or constant((longest - prompt) / rollout.max_turns),
        tool_s=tool_s or constant(0.0),
        rollout=rollout,
        seed=seed,
    )


@dataclass(frozen=True)
class RecordedWorkload:
    """The groups of a run, in their order and again from the first."""

    groups: Sequence[GroupWork]

    def group(self, number: int) -> GroupWork:
        return self.groups[number % len(self.groups)]
