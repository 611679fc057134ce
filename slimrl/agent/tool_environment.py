"""Tools as an environment: its observations are their answers to the policy's calls, and nothing else.

A turn without calls completes the episode. A malformed call, an unknown tool, a ToolError and a call beyond the budget
are answered with an error message. The calls of a turn run at the same time, those of sub-agents too.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slimrl.agent.environment import Observation, Turn, answers, error_text
from slimrl.agent.subagents import TASK, Delegate, Delegation
from slimrl.agent.tool_call import MalformedCall, ToolCall
from slimrl.agent.tools import EpisodeInfo, ToolAnswer, ToolBox, ToolError
from slimrl.config.schema.agent import AgentConfig
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import CACHE_HITS


@dataclass(eq=False)
class ToolEnvironment:
    """Environment with tools: functions, and those of MCP servers.

    Args:
        timeout_s: deadline of a call.
    """

    tools: ToolBox
    agent: AgentConfig
    timeout_s: float
    num_calls: int = 0
    num_delegated_calls: int = 0
    """Number of tool calls that sub-agents made"""
    num_cache_hits: int = 0
    info: EpisodeInfo | None = None
    delegate: Delegate | None = None
    """Runs sub-agents; set before the first step where there are any"""

    async def start(self, prompt: Prompt, *, seed: int, scratch: dict[str, Any]) -> Observation:
        self.info = EpisodeInfo(prompt=prompt, seed=seed, scratch=scratch)
        self.tools = await self.tools.for_episode()
        return Observation(messages=first_messages(prompt, self.agent.system_prompt), tools=self.tools.schemas)

    async def step(self, turn: Turn) -> Observation:
        if not turn.calls or turn.finish_reason == "end":
            return Observation(done=True)
        if turn.is_last:
            return Observation(truncated=True)
        given = await self._answers(turn.calls)
        self.num_cache_hits += sum(answer.from_cache for answer in given)
        return Observation(
            messages=answers(turn, [answer.text for answer in given]),
            tool_errors=[call.name for call, answer in zip(turn.calls, given, strict=True) if answer.is_error],
        )

    async def close(self) -> None:
        """Close what the tools kept for the episode."""
        try:
            if self.info is not None:
                await self.info.close()
        finally:
            await self.tools.end_episode()

    @property
    def cache_hits(self) -> dict[str, float]:
        """The metric `tool_cache_hit_fraction`, a fraction of the calls of the trajectory, if there are any and a tool
        is pure."""
        return {CACHE_HITS: self.num_cache_hits / self.num_calls} if self.tools.caches and self.num_calls else {}

    async def _answers(self, calls: Sequence[ToolCall | MalformedCall]) -> list[ToolAnswer]:
        """Answers to all calls of a turn; sub-agents may make as many calls as are left without the turn's own."""
        asked = [self._is_delegated(call) for call in calls]
        limit = self.agent.max_tool_calls
        num_own = sum(isinstance(call, ToolCall) for call in calls) - sum(asked)
        left = None if limit is None else max(0, limit - self._num_used - num_own)
        max_calls = None if left is None else left // max(1, sum(asked))
        answering = [
            self._delegated(call, number, sum(asked), max_calls) if of_subagent else self._answer(call)
            for number, (call, of_subagent) in enumerate(zip(calls, asked, strict=True))
        ]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(each) for each in answering]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures.exceptions[0].__cause__
        return [task.result() for task in tasks]

    @property
    def _num_used(self) -> int:
        return self.num_calls + self.num_delegated_calls

    def _is_delegated(self, call: ToolCall | MalformedCall) -> bool:
        return isinstance(call, ToolCall) and call.name in self.agent.subagents

    async def _delegated(
        self, call: ToolCall | MalformedCall, number: int, num_parallel: int, max_calls: int | None
    ) -> ToolAnswer:
        assert isinstance(call, ToolCall)
        assert self.delegate is not None
        task = call.arguments.get(TASK)
        if not isinstance(task, str):
            return ToolAnswer(text=error_text(f"{TASK} must be a text"), is_error=True)
        delegation = Delegation(
            name=call.name, task=task, number=number, num_parallel=num_parallel, max_calls=max_calls
        )
        found = await self.delegate(delegation)
        self.num_delegated_calls += found.num_calls
        return found.answer

    async def _answer(self, call: ToolCall | MalformedCall) -> ToolAnswer:
        try:
            if isinstance(call, MalformedCall):
                raise ToolError(call.problem)
            limit, self.num_calls = self.agent.max_tool_calls, self.num_calls + 1
            if limit is not None and self._num_used > limit:
                raise ToolError(f"no tool calls are left of {limit}; answer without them")
            return await self.tools.call(call.name, call.arguments, self.timeout_s, self.info)
        except ToolError as error:
            return ToolAnswer(text=error_text(str(error)), is_error=True)


def first_messages(prompt: Prompt, system_prompt: str | None) -> list[dict[str, Any]]:
    """The prompt's messages, after the system prompt if they have none of their own."""
    if system_prompt is None or prompt.messages[0]["role"] == "system":
        return list(prompt.messages)
    return [{"role": "system", "content": system_prompt}, *prompt.messages]
