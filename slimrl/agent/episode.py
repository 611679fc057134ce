"""An episode: the policy and its environment take turns."""

import asyncio
import copy
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

from slimrl.agent.conversation import Conversation
from slimrl.agent.environment import EnvironmentFailure, Observation, Turn, error_text
from slimrl.agent.environment_host import EnvironmentHost
from slimrl.agent.roles.conversations import AnyConversation, Conversations
from slimrl.agent.subagents import DelegateAnswer, Delegation, answer_of
from slimrl.agent.tools import ToolAnswer
from slimrl.base.spans import SPANS
from slimrl.config.schema.agent import AgentConfig
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.data.engine import Engine
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import SearchTree, Status, Trajectory

RunSubagent = Callable[[Delegation, int, int], Awaitable[Trajectory]]
"""Runs a sub-agent within so many turns and tokens."""


class Episode:
    """One trajectory in the making, which the function of `agent.episode` runs to its end."""

    def __init__(
        self,
        prompt: Prompt,
        conversations: Conversations,
        host: EnvironmentHost,
        run_subagent: RunSubagent,
        *,
        engine: Engine,
        rollout: RolloutConfig,
        agent: AgentConfig,
        parallel_subagents: bool,
    ) -> None:
        self.prompt, self.conversations, self.host, self._run_subagent = prompt, conversations, host, run_subagent
        self.engine, self.rollout, self.agent = engine, rollout, agent
        self._subagent_lock = nullcontext() if parallel_subagents else asyncio.Lock()
        self._of_subagents: dict[int, tuple[Delegation, Trajectory]] = {}
        """Calls and trajectories of the sub-agents that the last turn called, by the call's number"""
        host.offer(self._delegate)

    async def fork(self, number: int) -> "Episode":
        """Another episode in the same state, which samples its turns anew. Between two turns alone, without sub-agents.

        Args:
            number: tells it from all other forks of the trajectory.

        Raises:
            EnvironmentFailure: the environment raised, or the same turns led to another state.
        """
        other = copy.copy(self)
        other.host, other.conversations = await self.host.branch(), self.conversations.fork(number)
        return other

    @property
    def conversation(self) -> AnyConversation:
        """That of the role whose turn is next."""
        return self.conversations.current

    async def sample_turn(self) -> Turn | Status:
        """The next turn, or how the trajectory ends because there is none. Raises EngineError or EnvironmentFailure."""
        return await self.conversations.sample_turn()

    async def step(self, turn: Turn) -> Observation:
        """What the environment makes of a turn. Raises EnvironmentFailure or ToolCrash."""
        conversation = self.conversation
        conversation.count_calls(turn)
        try:
            with SPANS("environment"):
                observation = await self.host.step(turn)
        finally:
            # In the order of the calls, whichever ended first.
            for number in sorted(self._of_subagents):
                assert isinstance(conversation, Conversation)
                conversation.adopt(*self._of_subagents.pop(number))
        conversation.count_errors(observation.tool_errors)
        return observation

    async def _delegate(self, delegation: Delegation) -> DelegateAnswer:
        assert isinstance(self.conversation, Conversation)
        turns, tokens = (left // delegation.num_parallel for left in self.conversation.left())
        if min(turns, tokens) < 1:
            return DelegateAnswer(answer=ToolAnswer(text=NOTHING_LEFT, is_error=True), num_calls=0)
        async with self._subagent_lock:
            trajectory = await self._run_subagent(delegation, turns, tokens)
        self._of_subagents[delegation.number] = delegation, trajectory
        if trajectory.status in (Status.failed, Status.aborted):
            raise EnvironmentFailure(f"sub-agent {delegation.name}: {trajectory.metadata['error']}")
        return DelegateAnswer(answer=answer_of(trajectory), num_calls=trajectory.metadata["num_tool_calls"])

    def append_observation(self, turn: Turn, observation: Observation) -> bool:
        """Append to a context what a turn led to: to the policy's own, or to that of the role which is next.

        Returns:
            Whether there is room for another turn.

        Raises:
            EnvironmentFailure: the chat template has no words for these messages.
        """
        try:
            with SPANS("render"):
                return self.conversations.append_observation(turn, observation)
        except (ValueError, LookupError) as error:
            raise EnvironmentFailure(f"what the environment told the policy cannot be written: {error}") from error


NOTHING_LEFT = error_text("no turns or tokens are left for it; go on without it")

EpisodeLoop = Callable[[Episode], Awaitable[Status]]
"""Runs an episode to its end and says how it ended."""

Snapshot = Callable[[Episode, Status], Trajectory]
"""The trajectory of an episode as it is now, not scored."""


@dataclass(frozen=True, kw_only=True)
class Searched:
    """What a search found."""

    episode: Episode
    """The path that it chose"""
    status: Status
    tree: SearchTree | None
    """All turns, where they are trained"""


class Search(Protocol):
    """Searches the steps of episodes; started before the first one."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def run(self, episode: Episode, snapshot: Snapshot, figures: dict[str, int]) -> Searched:
        """
        Args:
            figures: gets those of the search, also of one that fails: `Trajectory.metadata["search"]`.

        Raises EngineError, EnvironmentFailure or ToolCrash.
        """
        ...


async def run_turns(episode: Episode) -> Status:
    """The policy and its environment take turns until one of them ends the episode."""
    while (status := await take_turn(episode)) is None:
        pass
    return status


async def take_turn(episode: Episode) -> Status | None:
    """A turn and what it leads to; how the episode ends if it ends."""
    turn = await episode.sample_turn()
    if isinstance(turn, Status):
        return turn
    observation = await episode.step(turn)
    if observation.done or (turn.finish_reason == "end" and not observation.truncated):
        return Status.completed
    if observation.truncated or turn.is_last or not episode.append_observation(turn, observation):
        return Status.truncated
    return None
