"""Reward functions, and how they score a trajectory."""

import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slimrl.base.threads import call_task_code
from slimrl.config.problems import suggestion
from slimrl.data.prompt import Prompt
from slimrl.data.roles import trained_roles
from slimrl.data.trajectory import Status, Trajectory
from slimrl.rewards.deadline import within

Reward = float | Mapping[str, float]
"""A number, or named parts whose sum is the reward."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """A reward and what belongs to the turns; sequences have `trajectory.num_turns` entries or none."""

    reward: Reward
    turn_rewards: Sequence[float] = ()
    """Reward of each turn, which `reward` does not include"""
    parts: Mapping[str, float] | None = None
    """What is kept as the named parts of a `reward` that is a number and not their plain sum"""
    turn_states: Sequence[str] = ()
    """State of the environment before each turn, for GiGPO"""
    advantage: float | None = None
    """Advantage of the trajectory, for `algorithm.advantage: given`"""
    turn_advantages: Sequence[float] = ()
    """Advantage of each turn, for `algorithm.advantage: given` with `algorithm.credit.name: turn`"""
    by_role: Mapping[str, float] = field(default_factory=dict)
    """Reward of roles, in an episode of several; one that is not named has `reward`"""


RewardFunction = Callable[[Trajectory, Prompt], Reward | Score | Awaitable[Reward | Score]]


async def score(
    trajectory: Trajectory, prompt: Prompt, function: RewardFunction, timeout_s: float, roles: Collection[str] = ()
) -> None:
    """Set the reward of a trajectory, its named parts, and what a Score gives; a failed trajectory keeps its NaN.

    A synchronous function runs in its own thread, so a slow one blocks neither the episodes nor the end of the run.

    Args:
        roles: those that there are besides the episode's own, such as one that was not asked in it.

    Raises:
        TimeoutError: no reward within `timeout_s`.
        ValueError: the function returned something else than finite numbers, a list that has not one entry for each
            turn, or a role that there is not.
        TaskCodeExited: the function called sys.exit(), for example.
    """
    if trajectory.status is Status.failed:
        return
    value = await within(call_task_code(function, trajectory, prompt), timeout_s, "no reward")
    by_role: Mapping[str, float] = {}
    if isinstance(value, Score):
        by_role = {part_name(role): finite_number(one, f"by_role of {role}") for role, one in value.by_role.items()}
        _refuse_unknown_roles(by_role, {*trajectory.metadata.get("roles", {}), *roles})
        _set_turns(trajectory, value)
        parts, value = dict(value.parts or {}), value.reward
        trajectory.rewards = {part_name(name): finite_number(part, name) for name, part in parts.items()}
    if isinstance(value, Mapping):
        parts = {part_name(name): finite_number(part, name) for name, part in value.items()}
        trajectory.reward = finite_number(math.fsum(parts.values()), "the sum of its parts")
        trajectory.rewards = parts
    else:
        trajectory.reward = finite_number(value, "reward")
    trajectory.role_rewards = {role: by_role.get(role, trajectory.reward) for role in trained_roles(trajectory)}


def _refuse_unknown_roles(named: Collection[str], known: Collection[str]) -> None:
    if unknown := sorted(set(named) - set(known)):
        said = f"the episode has {', '.join(sorted(known))}" if known else "the episode has no roles"
        raise ValueError(
            f"by_role names {', '.join(unknown)}, and {said}.{suggestion(unknown[0], known)} If an episode may end "
            "before a role is asked, name it in ROLES of the environment's class or in agent.roles."
        )


def _set_turns(trajectory: Trajectory, given: Score) -> None:
    """Set what belongs to turns, or nothing if it does not fit them."""
    values: dict[str, Any] = {
        "turn_rewards": [finite_number(one, "turn_rewards") for one in given.turn_rewards],
        "turn_states": [_text(one) for one in given.turn_states],
        "advantage": None if given.advantage is None else finite_number(given.advantage, "advantage"),
        "turn_advantages": [finite_number(one, "turn_advantages") for one in given.turn_advantages],
    }
    replace(trajectory, **values).check_turns()
    vars(trajectory).update(values)


def part_name(name: Any) -> str:
    """A part's name; raises ValueError if it is no name."""
    if not isinstance(name, str) or not name:
        raise ValueError(f"the reward function named a part {name!r}; it must be a non-empty string")
    return name


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"the reward function returned a state {value!r} among turn_states; it must be a string")
    return value


def finite_number(value: Any, name: str) -> float:
    """A finite float from anything that `float` takes except text, such as numbers of numpy and torch."""
    try:
        number = float(value) if hasattr(value, "__float__") else math.nan
    except (TypeError, ValueError, RuntimeError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"the reward function returned {name} = {value!r}; it must be a finite number")
    return number
