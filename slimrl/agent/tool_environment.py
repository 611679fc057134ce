"""Tools as an environment: their answers to the policy's calls are all that it is told.

A turn without calls completes the episode. A malformed call, an unknown tool, a ToolError and a call beyond the budget
are answered with an error message. The calls of a turn run at the same time.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

from slimrl.agent.environment import Observation, Turn, answers, error_text
from slimrl.agent.parsers import MalformedCall, ToolCall
from slimrl.agent.tools import EpisodeInfo, ToolAnswer, ToolBox, ToolError
from slimrl.config.schema import AgentConfig
from slimrl.data.trajectory import Prompt


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
    num_cache_hits: int = 0
    info: EpisodeInfo | None = None

    async def start(self, prompt: Prompt, *, seed: int, scratch: dict[str, Any]) -> Observation:
        self.info = EpisodeInfo(prompt=prompt, seed=seed, scratch=scratch)
        self.tools = await self.tools.for_episode()
        return Observation(messages=first_messages(prompt, self.agent.system_prompt), tools=self.tools.schemas)

    async def step(self, turn: Turn) -> Observation:
        if not turn.calls or turn.finish_reason == "end":
            return Observation(done=True)
        if turn.is_last:
            return Observation(truncated=True)
        given = await asyncio.gather(*map(self._answer, turn.calls))
        self.num_cache_hits += sum(answer.from_cache for answer in given)
        hits = self.num_cache_hits / max(self.num_calls, 1)
        return Observation(
            messages=answers(turn, [answer.text for answer in given]),
            tool_errors=[call.name for call, answer in zip(turn.calls, given, strict=True) if answer.is_error],
            metrics={"tool_cache_hit_fraction": hits} if self.tools.caches else {},
        )

    async def close(self) -> None:
        """Close what the tools kept for the episode."""
        if self.info is not None:
            await self.info.close()
        await self.tools.end_episode()

    async def _answer(self, call: ToolCall | MalformedCall) -> ToolAnswer:
        try:
            if isinstance(call, MalformedCall):
                raise ToolError(call.problem)
            limit, self.num_calls = self.agent.max_tool_calls, self.num_calls + 1
            if limit is not None and self.num_calls > limit:
                raise ToolError(f"no tool calls are left of {limit}; answer without them")
            return await self.tools.call(call.name, call.arguments, self.timeout_s, self.info)
        except ToolError as error:
            return ToolAnswer(text=error_text(str(error)), is_error=True)


def first_messages(prompt: Prompt, system_prompt: str | None) -> list[dict[str, Any]]:
    """The prompt's messages, after the system prompt if they have none of their own."""
    if system_prompt is None or prompt.messages[0]["role"] == "system":
        return list(prompt.messages)
    return [{"role": "system", "content": system_prompt}, *prompt.messages]
