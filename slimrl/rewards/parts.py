"""A reward of named parts: each has a function, a weight and perhaps a cap.

1. A trajectory gets the parts of every trajectory and the one that its prompt names, all at once.
2. A part's function returns what a reward function may return. Its value is the number, or the sum of what it names,
   which is kept as `<part>/<name>`.
3. The reward is the sum over the parts of weight times value, the value limited to plus or minus the cap. Rewards of
   turns are limited, weighted and added in the same way, turn by turn.
4. The values themselves are kept as the trajectory's named rewards, before caps and weights.
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slimrl.base.threads import call_task_code
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Trajectory
from slimrl.rewards.retries import NO_RETRIES, Retries
from slimrl.rewards.scoring import Score, finite_number, part_name

RETRIES_KEY = "num_reward_retries"
"""Key of a trajectory's metadata: number of retries of its reward functions."""


class PartFailed(Exception):
    """A reward function failed on a trajectory; the message names it and the cause."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of the reward."""

    name: str
    function: Callable[..., Any]
    """Function of a trajectory and its prompt; in a group reward, of a prompt's trajectories and the prompt"""
    path: str
    """Import path of the function, for errors"""
    weight: float = 1.0
    cap: float | None = None
    verified: bool = False

    def counted(self, value: float) -> float:
        """What a value counts in the reward."""
        limited = value if self.cap is None else max(-self.cap, min(self.cap, value))
        return self.weight * limited

    @property
    def title(self) -> str:
        """Name of the part with its import path, for errors."""
        return f"{self.name} ({self.path})" if self.name else self.path


def failure(part: Part, error: Exception) -> PartFailed:
    return PartFailed(f"{part.title} failed: {type(error).__name__}: {error}")


def count_retry(trajectory: Trajectory) -> None:
    trajectory.metadata[RETRIES_KEY] = trajectory.metadata.get(RETRIES_KEY, 0) + 1


@dataclass(frozen=True, kw_only=True)
class SingleReward:
    """A reward function alone, whose result is the reward as it is."""

    part: Part
    retries: Retries = NO_RETRIES

    def parts_of(self, prompt: Prompt) -> list[Part]:
        """The parts of the reward of a prompt's trajectories."""
        return [self.part]

    async def __call__(self, trajectory: Trajectory, prompt: Prompt) -> Any:
        """The result of the reward function. Raises PartFailed."""
        return await _value(self.part, trajectory, prompt, self.retries)


@dataclass(frozen=True, kw_only=True)
class PartsReward:
    """A reward that is the sum of its parts."""

    parts: Sequence[Part]
    by_name: Mapping[str, Part] = field(default_factory=dict)
    name_key: str = "reward"
    retries: Retries = NO_RETRIES

    async def __call__(self, trajectory: Trajectory, prompt: Prompt) -> Score:
        """Raises PartFailed, and ValueError if two parts give what only one may."""
        parts = self.parts_of(prompt)
        tasks = [asyncio.create_task(_value(part, trajectory, prompt, self.retries)) for part in parts]
        try:
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        except asyncio.CancelledError as cancelled:
            # At the deadline, whose error names these parts.
            late = [part.title for part, task in zip(parts, tasks, strict=True) if not task.done()]
            raise asyncio.CancelledError(", ".join(late)) from cancelled
        finally:
            # Not awaited, since a part may ignore it.
            for task in tasks:
                task.cancel()
        if failures := [error for task in tasks if task in ended and (error := task.exception())]:
            raise failures[0] from failures[0].__cause__
        return _combined(parts, [_as_score(task.result()) for task in tasks])

    def parts_of(self, prompt: Prompt) -> list[Part]:
        """The parts of the reward of a prompt's trajectories."""
        name = prompt.metadata.get(self.name_key)
        return [*self.parts, *([self.by_name[name]] if self.by_name and name is not None else [])]


async def _value(part: Part, trajectory: Trajectory, prompt: Prompt, retries: Retries) -> Any:
    try:
        return await retries.call(
            lambda: call_task_code(part.function, trajectory, prompt),
            f"{trajectory.trajectory_id}: {part.title}",
            lambda: count_retry(trajectory),
        )
    except Exception as error:
        # A task's own code may raise anything; the trajectory fails with this cause.
        raise failure(part, error) from error


def _as_score(value: Any) -> Score:
    return value if isinstance(value, Score) else Score(reward=value)


def _combined(parts: Sequence[Part], scores: Sequence[Score]) -> Score:
    rewards: list[float] = []
    named: dict[str, float] = {}
    turns: list[list[float]] = []
    roles = {role for given in scores for role in given.by_role}
    by_role: dict[str, list[float]] = {role: [] for role in roles}
    single: dict[str, Any] = {}
    for part, given in zip(parts, scores, strict=True):
        value, inner = _named_values(part, given)
        rewards.append(part.counted(value))
        named |= {part.name: value, **inner}
        for role in roles:
            own = given.by_role.get(role, value)
            by_role[role].append(part.counted(finite_number(own, f"{part.name}: by_role of {role}")))
        if len(given.turn_rewards):
            turns.append([part.counted(finite_number(one, f"{part.name}: turn_rewards")) for one in given.turn_rewards])
        for name in ("advantage", "turn_states", "turn_advantages"):
            one = getattr(given, name)
            if one is None or (name != "advantage" and not len(one)):
                continue
            if name in single:
                raise ValueError(f"two parts give {name}; only one may")
            single[name] = one
    if len({len(of_turns) for of_turns in turns}) > 1:
        raise ValueError(f"parts give rewards of {sorted({len(of_turns) for of_turns in turns})} turns")
    return Score(
        reward=math.fsum(rewards), parts=named, turn_rewards=[math.fsum(each) for each in zip(*turns, strict=True)],
        by_role={role: math.fsum(own) for role, own in by_role.items()},
        **single,
    )  # fmt: skip


def _named_values(part: Part, given: Score) -> tuple[float, dict[str, float]]:
    """The value of a part, and what its function names within it."""
    if not isinstance(given.reward, Mapping):
        return finite_number(given.reward, part.name), {}
    inner = {f"{part.name}/{part_name(name)}": finite_number(one, name) for name, one in given.reward.items()}
    return finite_number(math.fsum(inner.values()), f"the sum of {part.name}"), inner
