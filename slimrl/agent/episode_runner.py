"""Runs episodes, each as one coroutine that gives one trajectory.

The trajectory is truncated when it runs out of turns or tokens, aborted at its deadline or by the engine, and failed if
the engine does not answer or the environment or a tool crashes. It always keeps the tokens so far, but for a search,
which at its deadline has none.
`agent.episode` puts a function of one's own in place of `run_turns`. A search (tree_search) tries several turns in a
state, and its trajectory is the best path.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from slimrl.agent.compaction import SummaryRule
from slimrl.agent.conversation import Conversation
from slimrl.agent.dialogue import Dialogues
from slimrl.agent.environment import EnvironmentFailure, MakeEnvironment, Observation
from slimrl.agent.environment_host import EnvironmentHost
from slimrl.agent.episode import Episode, EpisodeLoop, Search, run_turns
from slimrl.agent.episode_end import complete
from slimrl.agent.isolation.server import EnvironmentServer
from slimrl.agent.roles.conversations import AnyConversation, Conversations
from slimrl.agent.roles.past_conversation import PastConversation
from slimrl.agent.roles.player import Player, player_of
from slimrl.agent.roles.player_conversation import PlayerConversation
from slimrl.agent.subagents import Delegation
from slimrl.agent.tool_environment import ToolEnvironment
from slimrl.agent.tools import ToolBox, ToolCrash, ToolsUnavailable
from slimrl.base.seeds import derive_seed
from slimrl.base.spans import SPANS
from slimrl.config.schema.agent import PAST, POLICY, AgentConfig
from slimrl.config.schema.rollout import RolloutConfig, SamplingConfig
from slimrl.data.engine import RUN_EVALUATION, Engine, EngineError
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Status, Trajectory

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EpisodeRunner:
    """Runs the episodes. `rollout` has their limits (turns, tokens, deadlines), `agent` what they are shown."""

    engine: Engine
    dialogues: Dialogues
    environment: MakeEnvironment
    rollout: RolloutConfig
    agent: AgentConfig
    episode_loop: EpisodeLoop = run_turns
    search: Search | None = None
    """Searches each episode; but in the evaluations of a training run, which are to show the policy alone"""
    summary_rule: SummaryRule | None = None
    """Writes the summaries of compaction; None for the policy"""
    subagents: Mapping[str, ToolBox] = field(default_factory=dict)
    """Tools of each sub-agent, by the sub-agent's name"""
    parallel_subagents: bool = True
    """Whether sub-agents that one turn calls run at the same time, otherwise one after the other: an engine whose
    batches are deterministic takes one request at a time of a trajectory."""
    tools: ToolBox = field(default_factory=lambda: ToolBox([]))
    """The tools of the environment, if the environment consists of tools"""
    players: Mapping[str, Player] = field(default_factory=dict)
    """Who plays roles in place of the policy, by name"""
    past: Engine | None = None
    """The engines of older versions of the policy, if there are any"""
    _open: dict[str, Player] = field(default_factory=dict, init=False)
    """The players that were started, or whose start failed"""

    async def start(self) -> None:
        """Open what the tools and the players need; called once, before the first episode; raises ToolsUnavailable."""
        await asyncio.to_thread(self.tools.open)
        for name, player in self.players.items():
            self._open[name] = player
            try:
                async with asyncio.timeout(self.agent.start_timeout_s):
                    if hasattr(player, "start"):
                        await player.start()
            except Exception as error:
                # A player of the task's own may raise anything.
                raise ToolsUnavailable(f"agent.players.{name}: start failed: {error!r}") from error
        if self.search is not None:
            await self.search.start()

    async def stop(self) -> None:
        """Close the tools and the players, and end the environments' processes; called once, after the last episode."""
        while self._open:
            name, player = self._open.popitem()
            try:
                async with asyncio.timeout(self.agent.close_timeout_s):
                    if hasattr(player, "close"):
                        await player.close()
            except Exception as error:  # noqa: BLE001 - a player of the task's own may raise anything
                log.warning("agent.players.%s: close failed: %r", name, error)
        if self.search is not None:
            await self.search.stop()
        await asyncio.to_thread(self.tools.close)
        if isinstance(self.environment, EnvironmentServer):
            await self.environment.aclose()

    async def run(
        self,
        prompt: Prompt,
        *,
        trajectory_id: str,
        sampling: SamplingConfig,
        seed: int | None,
        scratch: dict[str, Any] | None = None,
    ) -> Trajectory:
        """Run the episode of one trajectory, which is not yet scored.

        Args:
            trajectory_id: unique in the run; also the engine's session id.
            seed: the seeds of the requests and of the environment are derived from it; None lets the engine choose.
            scratch: of the calling trajectory, for a sub-agent.
        """
        trajectory = Trajectory(
            group_id=prompt.prompt_id,
            trajectory_id=trajectory_id,
            segments=[],
            status=Status.failed,
            scratch={} if scratch is None else scratch,
        )
        search = None if trajectory_id.startswith(RUN_EVALUATION) else self.search

        def snapshot(episode: Episode, status: Status) -> Trajectory:
            state = replace(trajectory, status=status, scratch=episode.host.scratch, metadata={})
            complete(state, episode.conversations, episode.host)
            return state

        async def run_subagent(delegation: Delegation, turns: int, tokens: int) -> Trajectory:
            assert conversations is not None
            caller = conversations.current
            assert isinstance(caller, Conversation)
            task = {"role": "user", "content": caller.escaped(delegation.task)}
            path = ("subagent", caller.num_turns - 1, delegation.number)
            return await self._of_subagent(delegation, turns, tokens).run(
                replace(prompt, messages=[task]),
                trajectory_id=trajectory_id,
                sampling=sampling,
                seed=None if seed is None else derive_seed(seed, *path),
                scratch=trajectory.scratch,
            )

        host, conversations = EnvironmentHost(self.environment, self.agent), None
        begin = partial(self._conversation, prompt, trajectory_id=trajectory_id, sampling=sampling, seed=seed)
        try:
            with SPANS("start"):
                first = await host.start(prompt, seed=derive_seed(seed or 0, "environment"), scratch=trajectory.scratch)
                conversations = Conversations(begin, first)
            async with asyncio.timeout(self.rollout.trajectory_timeout_s):
                episode = Episode(
                    prompt,
                    conversations,
                    host,
                    run_subagent,
                    engine=self.engine,
                    rollout=self.rollout,
                    agent=self.agent,
                    parallel_subagents=self.parallel_subagents,
                )
                if search is None:
                    trajectory.status = await self._run_loop(episode)
                else:
                    found = await search.run(episode, snapshot, trajectory.metadata.setdefault("search", {}))
                    conversations, host = found.episode.conversations, found.episode.host
                    trajectory.status, trajectory.scratch = found.status, host.scratch
                    trajectory.search_tree = found.tree
            if trajectory.status is Status.aborted:
                trajectory.metadata["error"] = "aborted by the engine"
        except TimeoutError:
            trajectory.status = Status.aborted
            trajectory.metadata["error"] = f"not finished within {self.rollout.trajectory_timeout_s:g} s"
        except EngineError as error:
            trajectory.metadata["error"] = str(error)
        except (ToolCrash, EnvironmentFailure) as error:
            # Where in the task's own code it was raised.
            log.warning("%s: %s", trajectory_id, error, exc_info=error)
            trajectory.metadata["error"] = str(error)
        finally:
            if self.past is not None:
                self.past.close(trajectory_id)
            await host.close()
        complete(trajectory, conversations, host)
        if conversations is not None and (roles := self._roles(prompt, conversations)):
            trajectory.metadata["roles"] = roles
        return trajectory

    def _roles(self, prompt: Prompt, conversations: Conversations) -> dict[str, Any]:
        """What is known of each role; empty in an episode without roles."""
        found = {}
        for role, conversation in conversations.by_role.items():
            if role:
                name, settings = player_of(role, prompt, self.agent), self.agent.roles.get(role)
                found[role] = {
                    "player": name or POLICY,
                    "train": not name and (settings is None or settings.train),
                    "num_prompt_messages": conversation.num_prompt_messages,
                }
                if isinstance(conversation, PastConversation):
                    found[role]["version"] = conversation.version
                if conversations.groups[role]:
                    found[role]["group"] = conversations.groups[role]
        return found

    def _of_subagent(self, delegation: Delegation, turns: int, tokens: int) -> "EpisodeRunner":
        """Runs a sub-agent within so many turns and tokens."""
        settings = self.agent.subagents[delegation.name]
        agent = replace(
            self.agent, system_prompt=settings.system_prompt, max_tool_calls=delegation.max_calls, subagents={}
        )
        tools = self.subagents[delegation.name]
        return replace(
            self,
            environment=partial(ToolEnvironment, tools, agent, self.rollout.tool_timeout_s),
            rollout=replace(self.rollout, max_turns=min(turns, settings.max_turns), max_trajectory_tokens=tokens),
            agent=agent,
            episode_loop=run_turns,
        )

    def _conversation(
        self,
        prompt: Prompt,
        first: Observation,
        *,
        trajectory_id: str,
        sampling: SamplingConfig,
        seed: int | None,
    ) -> AnyConversation:
        name = player_of(first.role, prompt, self.agent)
        if name and name != PAST:
            if name not in self.players:
                raise EnvironmentFailure(f"{prompt.prompt_id}: `players` names {name}, which agent.players has not")
            return PlayerConversation(
                first.messages,
                first.tools or (),
                name=name,
                player=self.players[name],
                max_turns=self.rollout.max_turns,
                seed=seed or 0,
            )
        kind, engine = (PastConversation, self.past) if name else (Conversation, self.engine)
        if engine is None:
            raise EnvironmentFailure(f"{prompt.prompt_id}: `players` names {name}, and no engine plays older versions")
        try:
            return kind(
                first.messages,
                engine=engine,
                dialogue=self.dialogues.of(first.tools or ()),
                rollout=self.rollout,
                agent=self.agent,
                sampling=sampling,
                session_id=trajectory_id,
                seed=seed,
                summary_rule=self.summary_rule,
                role=first.role,
            )
        except (ValueError, TypeError) as error:
            raise EnvironmentFailure(f"the environment's start does not fit the chat template: {error}") from error

    async def _run_loop(self, episode: Episode) -> Status:
        if self.episode_loop is run_turns:
            return await run_turns(episode)
        try:
            status = await self.episode_loop(episode)
        except (EngineError, ToolCrash, EnvironmentFailure):
            raise
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            # A CancelledError of a task that the function awaited is its own fault.
            raise EnvironmentFailure(f"{self.agent.episode} raised {error!r}") from error
        if not isinstance(status, Status):
            raise EnvironmentFailure(f"{self.agent.episode} returned {status!r}, not a Status")
        return status
