"""Calls one environment within deadlines, and keeps what it reported for the trajectory.

An environment that cannot start is closed and replaced by a new instance, `agent.start_retries` times. Its code is the
task's own and may raise anything: what it raises becomes an EnvironmentFailure, which fails the trajectory.

`branch` gives a second host in the same state: of the environment's own copy, or of a new instance that has taken the
same turns, which must have led to the same states.
"""

import asyncio
import copy
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from slimrl.agent.environment import Environment, EnvironmentFailure, MakeEnvironment, Message, Observation, Turn
from slimrl.agent.subagents import Delegate
from slimrl.agent.tool_environment import ToolEnvironment
from slimrl.agent.tools import ToolCrash
from slimrl.base.threads import reportable
from slimrl.config.schema.agent import AgentConfig
from slimrl.data.prompt import Prompt
from slimrl.data.roles import ROLE_NAME, ROLE_NAME_RULE

log = logging.getLogger(__name__)

PNG = b"\x89PNG\r\n\x1a\n"
"""The first bytes of every PNG (ISO/IEC 15948)"""


@dataclass(kw_only=True)
class EnvironmentReport:
    """What an environment did in a trajectory; `Trajectory.metadata["environment"]`."""

    start_retries: int = 0
    rewards: list[float] = field(default_factory=list)
    """Reward of each step; empty if the environment gave none"""
    states: list[str] = field(default_factory=list)
    """State id before each turn; empty if one of them is unknown"""
    metrics: dict[str, float] = field(default_factory=dict)
    role_rewards: dict[str, float] = field(default_factory=dict)
    """What each role was paid in all"""

    def to_json(self) -> dict[str, Any]:
        """The fields that are not empty."""
        return {name: value for name, value in vars(self).items() if value}


class EnvironmentHost:
    """The environment of one trajectory, called within deadlines."""

    def __init__(self, make: MakeEnvironment, agent: AgentConfig) -> None:
        self._make, self._agent = make, agent
        self._name = agent.environment or "the tools"
        # Each call of a tool has a deadline of its own.
        self._step_timeout_s = agent.step_timeout_s if agent.environment else None
        self._environment: Environment | None = None
        self._begun: _Begun | None = None
        """How the environment was started"""
        self.scratch: dict[str, Any] = {}
        """What the environment left for the reward"""
        self._role = ""
        """Role of the first observation"""
        self._turns: list[Turn] = []
        self._seen: list[_Seen] = []
        """The start, and what each turn led to"""
        self._rewards: list[float | None] = []
        self._states: list[str | None] = []
        self.report = EnvironmentReport()
        self.images: dict[int, bytes] = {}
        """PNGs of the states, by the number of the turn that follows"""
        self.measured = dict.fromkeys(("start_s", "step_s", "close_s"), 0.0)
        """Seconds of all attempts to start, of all steps, and of the close; what tools add"""

    async def start(self, prompt: Prompt, *, seed: int, scratch: dict[str, Any]) -> Observation:
        """Raises EnvironmentFailure: it could not start, retries included."""
        begun = time.monotonic()
        # A trajectory begins with an empty one, a sub-agent with that of its caller, which may hold what has no copy.
        self._begun = _Begun(prompt=prompt, seed=seed, scratch=dict(scratch))
        self.scratch = scratch
        try:
            first = await self._started(lambda made: made.start(prompt, seed=seed, scratch=scratch), scratch)
        finally:
            self.measured["start_s"] = time.monotonic() - begun
        if not first.messages:
            raise EnvironmentFailure(f"{self._name}: start gave no messages, so the policy has nothing to answer")
        self._states.append(first.state_id)
        self._role = first.role
        self._seen.append(_seen(first))
        self._keep(first)
        return first

    async def _started(
        self, start: Callable[[Environment], Awaitable[Observation]], scratch: dict[str, Any]
    ) -> Observation:
        """The first observation of the first instance that starts."""
        while True:
            try:
                made = self._environment = self._call_now("()", self._make)
                return await self._call("start", partial(start, made), self._agent.start_timeout_s)
            except EnvironmentFailure as failure:
                await self.close()
                if self.report.start_retries >= self._agent.start_retries:
                    raise
                log.warning("%s; tried again", failure)
                scratch.clear()
                self.report.start_retries += 1

    def offer(self, delegate: Delegate) -> None:
        """Let tools call sub-agents."""
        if isinstance(self._environment, ToolEnvironment):
            self._environment.delegate = delegate

    async def step(self, turn: Turn) -> Observation:
        """Raises EnvironmentFailure or ToolCrash."""
        assert self._environment is not None
        begun = time.monotonic()
        try:
            observation = await self._call("step", partial(self._environment.step, turn), self._step_timeout_s)
        finally:
            self.measured["step_s"] += time.monotonic() - begun
        is_over = observation.done or observation.truncated
        if not (observation.messages or is_over):
            raise EnvironmentFailure(f"{self._name}: step gave no messages, and the episode is not over")
        if not is_over and bool(observation.role) != bool(self._role):
            names = f"{self._role!r} and then {observation.role!r}"
            raise EnvironmentFailure(f"{self._name}: observations name the roles {names}; all must name one, or none")
        self._rewards.append(None if observation.reward is None else self._number(observation.reward, "reward"))
        self._states.append(observation.state_id)
        self._keep(observation)
        self._turns.append(turn)
        self._seen.append(_seen(observation))
        return observation

    async def branch(self) -> "EnvironmentHost":
        """Another host whose environment is in the same state, with a scratch of its own.

        Raises:
            EnvironmentFailure: the environment raised, or the same turns led to another state.
        """
        assert self._environment is not None
        scratch = self._call_now("copy of its scratch", partial(copy.deepcopy, self.scratch))
        made = None
        if hasattr(self._environment, "copy"):
            make_copy = partial(self._environment.copy, scratch=scratch)
            made = await self._within("copy", make_copy, self._agent.start_timeout_s)
        if made is None:
            return await self._replayed()
        other = EnvironmentHost(self._make, self._agent)
        other._environment, other.scratch = made, scratch
        other._begun, other._role = self._begun, self._role
        other._turns, other._seen = [*self._turns], [*self._seen]
        other._rewards, other._states, other.report = [*self._rewards], [*self._states], copy.deepcopy(self.report)
        other.images = dict(self.images)
        return other

    async def _replayed(self) -> "EnvironmentHost":
        assert self._begun is not None
        other, scratch = EnvironmentHost(self._make, self._agent), dict(self._begun.scratch)
        try:
            await other.start(self._begun.prompt, seed=self._begun.seed, scratch=scratch)
            for turn in self._turns:
                await other.step(turn)
            for number, (first, again) in enumerate(zip(self._seen, other._seen, strict=True)):
                if first != again:
                    raise EnvironmentFailure(
                        f"{self._name} cannot be copied: it has no `copy`, and the same {number} turns of the policy "
                        "led to another state"
                    )
        except BaseException:
            await other.close()
            raise
        return other

    async def close(self) -> None:
        """Close the environment, if there is one. What goes wrong is logged: the trajectory is over."""
        environment, self._environment = self._environment, None
        if environment is None:
            return
        begun = time.monotonic()
        try:
            await self._within("close", environment.close, self._agent.close_timeout_s)
        except EnvironmentFailure as failure:
            log.warning("%s", failure)
        self.measured["close_s"] += time.monotonic() - begun
        if isinstance(environment, ToolEnvironment):
            self.measured |= environment.cache_hits

    def finished_report(self, num_turns: int) -> EnvironmentReport:
        """The report with an entry for each turn; a turn that the environment never saw has no reward."""
        if any(reward is not None for reward in self._rewards):
            rewards = [reward or 0.0 for reward in self._rewards]
            self.report.rewards = rewards + [0.0] * (num_turns - len(rewards))
        states = self._states[:num_turns]
        if len(states) == num_turns and all(state is not None for state in states):
            self.report.states = [str(state) for state in states]
        return self.report

    def _keep(self, observation: Observation) -> None:
        for field_name in ("metrics", "role_rewards"):
            if not isinstance(value := getattr(observation, field_name), Mapping):
                raise EnvironmentFailure(f"{self._name}: {field_name} are {value!r}, not a dict")
        paid = self.report.role_rewards
        for role, value in observation.role_rewards.items():
            paid[str(role)] = paid.get(str(role), 0.0) + self._number(value, f"role_rewards[{role!r}]")
        if observation.image is not None:
            self.images[len(self._states) - 1] = observation.image
        for name, value in observation.metrics.items():
            self.report.metrics[str(name)] = self._number(value, f"metrics[{name!r}]")

    def _number(self, value: Any, what: str) -> float:
        try:
            number = float(value)
        except (TypeError, ValueError) as error:
            raise EnvironmentFailure(f"{self._name}: {what} is {value!r}, not a number") from error
        if not math.isfinite(number):
            raise EnvironmentFailure(f"{self._name}: {what} is {value!r}, not a finite number")
        return number

    async def _call(
        self, name: str, call: Callable[[], Awaitable[Observation]], timeout_s: float | None
    ) -> Observation:
        observation = await self._within(name, call, timeout_s)
        if not isinstance(observation, Observation):
            raise EnvironmentFailure(f"{self._name}: {name} returned {observation!r}, not an Observation")
        self._check(name, observation)
        return observation

    def _check(self, name: str, observation: Observation) -> None:
        """Raises EnvironmentFailure if a field is of another type, which would end the run where it is read."""
        role = observation.role
        if not isinstance(role, str) or (role and not ROLE_NAME.fullmatch(role)):
            raise EnvironmentFailure(f"{self._name}: {name}: role must be {ROLE_NAME_RULE}, not {role!r}")
        if observation.group and not (isinstance(observation.group, str) and ROLE_NAME.fullmatch(observation.group)):
            raise EnvironmentFailure(f"{self._name}: {name}: group must be {ROLE_NAME_RULE}, not {observation.group!r}")
        image = observation.image
        if image is not None and not (isinstance(image, bytes) and image.startswith(PNG)):
            raise EnvironmentFailure(f"{self._name}: {name}: image must be the bytes of a PNG")
        for field_name, fits, wanted in (
            ("messages", _is_message, 'a list of {"role": ..., "content": text}'),
            ("tools", _is_schema, "a list of JSON schemas of functions"),
            ("tool_errors", lambda one: isinstance(one, str), "a list of names"),
        ):
            value = getattr(observation, field_name)
            empty = value is None and field_name == "tools"
            if not empty and not (isinstance(value, list | tuple) and all(map(fits, value))):
                raise EnvironmentFailure(f"{self._name}: {name}: {field_name} must be {wanted}, not {value!r}")

    async def _within(self, name: str, call: Callable[[], Awaitable[Any]], timeout_s: float | None) -> Any:
        """The call's result; a call that is late is cancelled and left behind."""
        running = asyncio.ensure_future(_own_task(lambda: self._call_now(name, call)))
        try:
            done, _ = await asyncio.wait([running], timeout=timeout_s)
        finally:
            # Does nothing to a call that has ended.
            running.cancel()
        if not done:
            raise EnvironmentFailure(f"{self._name}: {name} took longer than {timeout_s:g} s")
        error = None if running.cancelled() else running.exception()
        if running.cancelled() or error is not None:
            if isinstance(error, ToolCrash | EnvironmentFailure):
                raise error
            raise EnvironmentFailure(f"{self._name}: {name} raised {error or 'CancelledError'!r}") from error
        return running.result()

    def _call_now[T](self, name: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except (Exception, SystemExit) as error:
            raise EnvironmentFailure(f"{self._name}: {name} raised {error!r}") from error


@dataclass(frozen=True, kw_only=True)
class _Begun:
    prompt: Prompt
    seed: int
    scratch: dict[str, Any]


_Seen = str | list[Message]
"""What an observation says of the state: its `state_id`, or without one its messages"""


def _seen(observation: Observation) -> _Seen:
    return list(observation.messages) if observation.state_id is None else observation.state_id


def _is_message(value: Any) -> bool:
    """Whether a chat template could write it; the assistant's messages of a prompt may be calls without content."""
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    return value["role"] == "assistant" or isinstance(value.get("content"), str)


def _is_schema(value: Any) -> bool:
    function = value.get("function") if isinstance(value, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


async def _own_task(call: Callable[[], Awaitable[Any]]) -> Any:
    try:
        return await call()
    except SystemExit as error:
        # A SystemExit in a task would end the event loop, and the run with it.
        raise reportable(error) from error
