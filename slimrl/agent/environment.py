"""What an episode does in: an environment, of which each trajectory has an instance of its own.

1. `start` gives the policy's first messages, and the tools that it is shown.
2. `step` takes each turn of the policy and gives the messages after it, or says that the episode is over.
3. `close` frees what the instance holds. It is called once, however the episode ended, and also after a start that
   failed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from slimrl.agent.tool_call import MalformedCall, ToolCall
from slimrl.data.prompt import Prompt

Message = dict[str, Any]
"""A message as chat templates take it: `role`, `content`, and of a tool's result `name` and `tool_call_id`"""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One turn of the policy."""

    index: int
    """Number of the turn in the trajectory, from 0"""
    text: str
    """Text of the turn without thinking and calls; the whole answer if a call is malformed"""
    reasoning: str | None = None
    """Thinking of the turn, if there is any"""
    calls: tuple[ToolCall | MalformedCall, ...] = ()
    finish_reason: Literal["stop", "end"] = "stop"
    """`stop`: it can be answered. `end`: the policy ended the whole text, so the episode is over in any case."""
    is_last: bool = False
    """Whether no turn is left after this one."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """An environment's answer to a turn, or the start of an episode."""

    messages: Sequence[Message] = ()
    """Messages for the policy: of roles `tool` (`answers` makes them) and `user`, after the start also `system`. Not
    needed if the episode is over."""
    tools: Sequence[dict[str, Any]] | None = None
    """JSON schemas of the tools that the policy is shown; read at the start of a conversation alone. None for no
    tools."""
    role: str = ""
    """In an environment of several roles the one that the messages are for, and whose turn is next; `messages` and
    `tools` begin its conversation where it has none"""
    group: str = ""
    """Name that roles of this episode share which are compared with each other alone, such as several that solve one
    task; read where a role's conversation begins. Empty to compare a role with the same one of the prompt's other
    episodes."""
    reward: float | None = None
    """Reward of the turn that is answered"""
    role_rewards: Mapping[str, float] = field(default_factory=dict)
    """What roles are paid now, whoever's turn it was"""
    done: bool = False
    """Whether the episode is completed."""
    truncated: bool = False
    """Whether the episode is over without being completed."""
    state_id: str | None = None
    """Text that is equal for equal states, which GiGPO compares (`algorithm.credit.name: gigpo`)"""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Figures that become the metrics `env/<name>`; a later value of a name replaces an earlier one of the
    trajectory."""
    image: bytes | None = None
    """A PNG that shows the state to people: it is kept with the conversations of `tracking.trajectories_per_step`. The
    policy does not see it."""
    tool_errors: Sequence[str] = ()
    """Names of the tools whose calls in the turn were answered with an error, one for each such call"""


class Environment(Protocol):
    """What the policy acts in; each trajectory has an instance of its own."""

    async def start(self, prompt: Prompt, *, seed: int, scratch: dict[str, Any]) -> Observation:
        """What the policy is told first, and the tools that it is shown.

        Args:
            seed: of this trajectory; all randomness comes from it.
            scratch: of this trajectory. The reward finds it as `trajectory.scratch`; it is not written to files.
        """
        ...

    async def step(self, turn: Turn) -> Observation:
        """What the policy is told after a turn, or that the episode is over."""
        ...

    async def close(self) -> None:
        """Free what the instance holds; called once, however the episode ended."""
        ...


class CopyingEnvironment(Environment, Protocol):
    """An environment that copies itself, as a search over an agent's steps wants it. Others are copied by a new
    instance that takes the same turns again (`EnvironmentHost.branch`), which must lead to the same states."""

    async def copy(self, *, scratch: dict[str, Any]) -> Environment | None:
        """Another instance in the same state, from which nothing that is done to either can be seen in the other.

        Args:
            scratch: of the copy, with the same values as that of this one.

        Returns:
            The copy, which is closed as others are; None if it cannot be made now, so that the turns are taken again.
        """
        ...


UNKNOWN_TOOL = "unknown"
"""Name under which a call is counted that names no tool"""

MakeEnvironment = Callable[[], Environment]


class EnvironmentFailure(Exception):
    """An environment raised, was too late, or gave something else than an observation; the trajectory fails."""


def answers(turn: Turn, results: Sequence[str]) -> list[Message]:
    """Messages that answer the calls of a turn, one text for each."""
    return [
        {"role": "tool", "name": call_name(call), "tool_call_id": call.id, "content": result}
        for call, result in zip(turn.calls, results, strict=True)
    ]


def call_name(call: ToolCall | MalformedCall) -> str:
    return call.name if isinstance(call, ToolCall) else UNKNOWN_TOOL


def error_text(problem: str) -> str:
    """The answer to a call that failed."""
    return f"error: {problem}"
