"""The episode: one coroutine plays the policy against its environment and gives one trajectory.

The trajectory is truncated when it runs out of turns or tokens, aborted at its deadline or by the engine, and failed if
the engine does not answer or the environment or a tool crashes. It always keeps the tokens so far.
`agent.episode` puts a function of one's own in place of `play`.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from slimrl.agent.conversation import Conversation
from slimrl.agent.dialogue import Dialogues
from slimrl.agent.environment import EnvironmentFailure, MakeEnvironment, Observation, Turn
from slimrl.agent.environment_host import EnvironmentHost
from slimrl.agent.tools import ToolCrash
from slimrl.config.schema import AgentConfig, RolloutConfig, SamplingConfig
from slimrl.data.engine import Engine, EngineError
from slimrl.data.seeds import derive_seed
from slimrl.data.trajectory import Prompt, Status, Trajectory


class Episode:
    """One trajectory in the making, in the hands of a play."""

    def __init__(
        self, runner: "EpisodeRunner", prompt: Prompt, conversation: Conversation, host: EnvironmentHost
    ) -> None:
        self.prompt, self.conversation, self._host = prompt, conversation, host
        self.engine, self.rollout, self.agent = runner.engine, runner.rollout, runner.agent

    async def sample_turn(self) -> Turn | Status:
        """The policy's next turn, or how the trajectory ends because there is none. Raises EngineError."""
        return await self.conversation.sample_turn()

    async def step(self, turn: Turn) -> Observation:
        """What the environment makes of a turn. Raises EnvironmentFailure or ToolCrash."""
        if turn.finish_reason == "stop" and not turn.is_last:
            self.conversation.count_calls(turn)
        observation = await self._host.step(turn)
        self.conversation.count_errors(observation.tool_errors)
        return observation

    def hear(self, turn: Turn, observation: Observation) -> bool:
        """Tell the policy what its turn led to.

        Returns:
            Whether there is room for another turn.

        Raises:
            EnvironmentFailure: the chat template has no words for these messages.
        """
        try:
            return self.conversation.hear(turn, observation.messages)
        except (ValueError, LookupError) as error:
            raise EnvironmentFailure(f"what the environment told the policy cannot be written: {error}") from error


Play = Callable[[Episode], Awaitable[Status]]
"""Plays an episode to its end and says how it ended."""


async def play(episode: Episode) -> Status:
    """The policy and its environment take turns until one of them ends the episode."""
    while True:
        turn = await episode.sample_turn()
        if isinstance(turn, Status):
            return turn
        observation = await episode.step(turn)
        if observation.done or (turn.finish_reason == "end" and not observation.truncated):
            return Status.completed
        if observation.truncated or turn.is_last or not episode.hear(turn, observation):
            return Status.truncated


@dataclass(frozen=True, kw_only=True)
class EpisodeRunner:
    """Runs the episodes. `rollout` has their limits (turns, tokens, deadlines), `agent` what they are shown."""

    engine: Engine
    dialogues: Dialogues
    environment: MakeEnvironment
    rollout: RolloutConfig
    agent: AgentConfig
    play: Play = play

    async def start(self) -> None:
        """Called once, before the first episode."""

    async def stop(self) -> None:
        """Called once, after the last episode."""

    async def run(
        self, prompt: Prompt, *, trajectory_id: str, sampling: SamplingConfig, seed: int | None
    ) -> Trajectory:
        """One trajectory, not yet scored.

        Args:
            trajectory_id: unique in the run; also the engine's session id.
            seed: the seeds of the requests and of the environment are derived from it; None lets the engine choose.
        """
        trajectory = Trajectory(
            group_id=prompt.prompt_id, trajectory_id=trajectory_id, segments=[], status=Status.failed
        )
        host, conversation = EnvironmentHost(self.environment, self.agent), None
        try:
            first = await host.start(prompt, seed=derive_seed(seed or 0, "environment"), scratch=trajectory.scratch)
            conversation = self._conversation(first, trajectory_id, sampling, seed)
            async with asyncio.timeout(self.rollout.trajectory_timeout_s):
                trajectory.status = await self._played(Episode(self, prompt, conversation, host))
            if trajectory.status is Status.aborted:
                trajectory.metadata["error"] = "aborted by the engine"
        except TimeoutError:
            trajectory.status = Status.aborted
            trajectory.metadata["error"] = f"not finished within {self.rollout.trajectory_timeout_s:g} s"
        except (EngineError, ToolCrash, EnvironmentFailure) as error:
            trajectory.metadata["error"] = str(error)
        finally:
            await host.close()
        _complete(trajectory, conversation, host)
        return trajectory

    def _conversation(
        self, first: Observation, trajectory_id: str, sampling: SamplingConfig, seed: int | None
    ) -> Conversation:
        try:
            return Conversation(
                first.messages,
                engine=self.engine,
                dialogue=self.dialogues.of(first.tools or ()),
                rollout=self.rollout,
                agent=self.agent,
                sampling=sampling,
                session_id=trajectory_id,
                seed=seed,
            )
        except ValueError as error:
            raise EnvironmentFailure(f"the environment's start does not fit the chat template: {error}") from error

    async def _played(self, episode: Episode) -> Status:
        if self.play is play:
            return await play(episode)
        try:
            status = await self.play(episode)
        except (EngineError, ToolCrash, EnvironmentFailure):
            raise
        except Exception as error:
            raise EnvironmentFailure(f"{self.agent.episode} raised {error!r}") from error
        if not isinstance(status, Status):
            raise EnvironmentFailure(f"{self.agent.episode} returned {status!r}, not a Status")
        return status


def _complete(trajectory: Trajectory, conversation: Conversation | None, host: EnvironmentHost) -> None:
    """Add the tokens, the messages and the figures of an episode that has ended."""
    counts: dict[str, Any] = {**dict.fromkeys(COUNTS, 0), "tool_calls": {}}
    num_turns = 0
    if conversation is not None:
        trajectory.segments, trajectory.messages = conversation.segments, conversation.messages
        num_turns = conversation.transcript.num_turns
        counts = {
            "num_turns": num_turns,
            "num_tool_calls": conversation.num_calls,
            "num_tool_errors": sum(counts["errors"] for counts in conversation.tool_calls.values()),
            "num_malformed_calls": sum(counts["malformed"] for counts in conversation.tool_calls.values()),
            "tool_calls": conversation.tool_calls,
            "num_cached_tokens": conversation.num_cached_tokens,
            "num_retries": conversation.num_retries,
            "num_prompt_messages": conversation.num_prompt_messages,
        }
    trajectory.times = host.times
    trajectory.metadata = {**counts, **trajectory.metadata, "environment": host.finished_report(num_turns).to_json()}


COUNTS = (
    "num_turns", "num_tool_calls", "num_tool_errors", "num_malformed_calls", "num_cached_tokens", "num_retries",
    "num_prompt_messages",
)  # fmt: skip
"""Of each trajectory, in its metadata"""
