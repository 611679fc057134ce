"""Runs an agent behind the gateway for each trajectory, in the place of episodes.

1. A session is opened; the agent gets the data line and the session's addresses and key.
2. The agent acts until it ends, or until the trajectory's deadline, and the session with it. What it leaves on the disk
   is removed then, which is no part of the trajectory's time.
3. The turns that the policy sampled become the trajectory's segments.

The trajectory is completed if the agent ended well, truncated if the policy ran out of turns or tokens, aborted at its
deadline or by the engine, and failed if the agent or the engine did. It always keeps the turns so far.
"""

import asyncio
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

from slimrl.agent.dialogue import Dialogues
from slimrl.agent.environment import UNKNOWN_TOOL
from slimrl.agent.gateway.agents import Agent, AgentFailed
from slimrl.agent.gateway.history import SampledTurn, count_calls
from slimrl.agent.gateway.server import GatewayServer
from slimrl.agent.gateway.session import Session
from slimrl.agent.tool_environment import first_messages
from slimrl.agent.turn_request import TurnRequests
from slimrl.config.schema.agent import POLICY, AgentConfig
from slimrl.config.schema.rollout import RolloutConfig, SamplingConfig
from slimrl.data.engine import Engine
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import POSTED_BY_ROLE, POSTED_REWARD, Status, Trajectory

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class GatewayRunner:
    """Runs the agents. `one_at_a_time`: a session's requests reach the engine one after another."""

    engine: Engine
    dialogues: Dialogues
    agent: Agent
    rollout: RolloutConfig
    config: AgentConfig
    one_at_a_time: bool = False
    server: GatewayServer = field(init=False)

    def __post_init__(self) -> None:
        self.server = GatewayServer(self.config.gateway)
        self._places = asyncio.Semaphore(self.config.max_commands) if self.config.command else nullcontext()

    async def start(self) -> None:
        """Raises NotListening: the gateway's address is none of this machine."""
        await self.server.start()

    async def stop(self) -> None:
        await self.server.close()

    async def run(
        self, prompt: Prompt, *, trajectory_id: str, sampling: SamplingConfig, seed: int | None
    ) -> Trajectory:
        """Run an agent for one trajectory, which is not yet scored; see EpisodeRunner.run."""
        # Before its deadline begins: each of those that hold a place has one.
        async with self._places:
            return await self._run(prompt, trajectory_id=trajectory_id, sampling=sampling, seed=seed)

    async def _run(
        self, prompt: Prompt, *, trajectory_id: str, sampling: SamplingConfig, seed: int | None
    ) -> Trajectory:
        session = Session(
            engine=self.engine,
            dialogues=self.dialogues,
            requests=TurnRequests(rollout=self.rollout, sampling=sampling, session_id=trajectory_id, seed=seed),
            agent=self.config,
            one_at_a_time=self.one_at_a_time,
            aside=self.server.aside,
        )
        connection = self.server.open(session)
        status, error, said = Status.completed, "", ""
        async with AsyncExitStack() as afterwards:
            try:
                async with asyncio.timeout(self.rollout.trajectory_timeout_s):
                    said = await self.agent.run(_line(prompt, self.config.system_prompt), connection, afterwards)
            except TimeoutError:
                status, error = Status.aborted, f"not finished within {self.rollout.trajectory_timeout_s:g} s"
            except AgentFailed as failure:
                # A function's exception has a traceback; that of a command is slimrl's own.
                log.warning("%s: %s", trajectory_id, failure, exc_info=failure.__cause__)
                status, error = Status.failed, str(failure)
            finally:
                self.server.end(connection)
                await session.close(self.config.close_timeout_s)
        if session.crash is not None:
            raise session.crash
        trajectory = Trajectory(
            group_id=prompt.prompt_id, trajectory_id=trajectory_id, segments=session.history.segments(), status=status
        )
        _complete(trajectory, session, error, said)
        if roles := self._roles(session):
            trajectory.metadata["roles"] = roles
            if "" in roles:
                trajectory.status = Status.failed
                trajectory.metadata["error"] = "some requests name a role, and others none"
            last = {turn.role: turn for turn in session.history.turns()}
            trajectory.messages = [{**said, "conversation": role} for role in roles for said in last[role].messages]
        return trajectory

    def _roles(self, session: Session) -> dict[str, Any]:
        """What is known of each role; empty if no request named one."""
        found: dict[str, Any] = {}
        for turn in session.history.turns():
            settings = self.config.roles.get(turn.role)
            told = len(turn.path[0].told_messages)
            facts = {"player": POLICY, "train": settings is None or settings.train, "num_prompt_messages": told}
            found.setdefault(turn.role, facts)
        return found if any(found) else {}


def _line(prompt: Prompt, system_prompt: str | None) -> Mapping[str, Any]:
    return {
        "id": prompt.prompt_id,
        "messages": first_messages(prompt, system_prompt),
        "label": prompt.label,
        "metadata": prompt.metadata,
    }


def _complete(trajectory: Trajectory, session: Session, error: str, said: str) -> None:
    """Add how a trajectory ended, its conversation and its figures.

    Args:
        said: what an agent that ended well said last.
    """
    last = session.history.last
    if session.fault is not None:
        trajectory.status, error = session.fault
    elif last is None:
        trajectory.status, error = Status.failed, error or _why_nothing(session, said)
    elif trajectory.status is not Status.aborted and (session.spent is not None or _is_cut_off(trajectory, session)):
        trajectory.status, error = Status.truncated, ""
    if session.refusal not in error:
        error = f"{error}; {session.refusal}" if error else session.refusal
    turns = list(session.history.turns())
    results = [result for turn in turns for result in turn.results]
    calls = count_calls(turns, UNKNOWN_TOOL)
    of_engine = sum((Counter(result.counts) for result in results), Counter())
    trajectory.messages = last.messages if last else []
    trajectory.metadata = {
        "num_turns": len(turns),
        "num_tool_calls": sum(counts["calls"] for counts in calls.values()),
        "num_tool_errors": 0,
        "num_malformed_calls": sum(counts["malformed"] for counts in calls.values()),
        "tool_calls": calls,
        "num_cached_tokens": sum(result.cached_tokens for result in results),
        "num_retries": sum(result.num_retries for result in results),
        "num_prompt_messages": len(last.path[0].told_messages) if last else 0,
        "environment": {"states": list(map(_state, turns))} if len(trajectory.segments) > 1 else {},
        "gateway": {"segments": len(trajectory.segments), **asdict(session.counts)},
        **({"error": error} if error else {}),
        **of_engine,
    }
    trajectory.measured = {"start_s": 0.0, "step_s": session.idle_s, "close_s": 0.0}
    if session.posted_reward is not None:
        trajectory.scratch[POSTED_REWARD] = session.posted_reward
    if session.posted_by_role:
        trajectory.scratch[POSTED_BY_ROLE] = session.posted_by_role


def _why_nothing(session: Session, said: str) -> str:
    """Why no turn is there to train, of an agent that ended well."""
    if session.spent is not None:
        return session.spent.message
    if session.counts.skipped:
        return f"agent.gateway.skip leaves out all {session.counts.skipped} requests of the agent"
    return f"the agent asked the policy nothing; {said}"


def _state(turn: SampledTurn) -> str:
    """Hash of what the policy was told before a turn: equal for equal messages, as `observed_states` has it for a
    trajectory of one segment."""
    told = [[message["role"], message["content"]] for message in turn.told_messages]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


def _is_cut_off(trajectory: Trajectory, session: Session) -> bool:
    """Whether an agent that ended well was left with a turn that ran out of tokens."""
    last = session.history.last
    return trajectory.status is Status.completed and last is not None and last.is_cut_off
