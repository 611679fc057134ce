"""Executes plans with the real tools, each time without what is known of earlier executions."""

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from slimrl_tools.synthesis.forward.plan import HERE, Plan, Step, filled, filled_arguments
from slimrl_tools.toy.task_lines import SYSTEM_PROMPT

from slimrl.agent.call_schemas import CallSchemas
from slimrl.agent.sandbox.pool import SandboxPool
from slimrl.agent.tools import (
    EpisodeInfo,
    ToolBox,
    ToolCrash,
    ToolError,
    ToolsUnavailable,
    check_arguments,
    shortened,
    tools_of,
)
from slimrl.config.load import intended_command, load_recipe
from slimrl.config.schema.agent import AgentConfig
from slimrl.data.prompt import Prompt


class PlanFailed(Exception):
    """A step of a plan gave no result; says which and why."""


@dataclass(frozen=True, kw_only=True)
class Call:
    tool: str
    arguments: dict[str, Any]
    answer: str
    """What the policy is told"""
    result: str
    """What later steps take of it"""

    @property
    def key(self) -> str:
        return json.dumps([self.tool, self.arguments], sort_keys=True)


def agent_of(source: str, tool_args: Mapping[str, Any]) -> AgentConfig:
    """The settings of a recipe's tools, or of tools by their import paths.

    Args:
        source: file of a recipe, or import paths with commas between them.
        tool_args: further arguments that the policy does not give.

    Raises:
        ValueError: the recipe is broken, or has no functions as tools.
    """
    if Path(source).suffix not in (".yaml", ".yml"):
        return AgentConfig(tools=source.split(","), tool_args=dict(tool_args), system_prompt=SYSTEM_PROMPT)
    agent = load_recipe(source, [], intended_command(source)).recipe.agent
    if not agent.tools or agent.environment or agent.command:
        raise ValueError(f"{source}: plans are made of the functions in agent.tools, and this recipe has none")
    agent.tool_args = {**agent.tool_args, **tool_args}
    return agent


class Executor:
    """
    Args:
        timeout_s: deadline of a call.

    Raises:
        ValueError: a tool cannot be made.
    """

    def __init__(self, agent: AgentConfig, timeout_s: float) -> None:
        tools = tools_of(agent.tools, agent.tool_args)
        check_arguments(tools, agent.tool_args)
        # Answers are asked for again, also those of pure tools.
        self._tools = [replace(tool, options=replace(tool.options, pure=False)) for tool in tools]
        self._agent, self._timeout_s = agent, timeout_s
        self.schemas = [tool.schema for tool in tools]
        self.parameters = {tool.name: tool.schema["function"]["parameters"] for tool in tools}
        self._judge = CallSchemas(self.schemas, closed=True)

    def __enter__(self) -> Self:
        self._runner, self._at_end = asyncio.Runner(), AsyncExitStack()
        sandbox = SandboxPool(self._agent.sandbox)
        self._at_end.push_async_callback(sandbox.close)
        self._box = ToolBox(self._tools, sandbox)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._runner.run(self._at_end.aclose())
        finally:
            self._runner.close()

    def calls(self, plan: Plan, instead: tuple[int, str] | None = None) -> list[Call]:
        """The calls of a plan.

        Args:
            instead: place of a step and what stands in the place of its result.

        Raises:
            PlanFailed: a call was refused, failed or was late, or its answer has no result.
        """
        return self._runner.run(self._calls(plan, instead))

    async def _calls(self, plan: Plan, instead: tuple[int, str] | None) -> list[Call]:
        message = {"role": "user", "content": plan.question}
        info = EpisodeInfo(prompt=Prompt(prompt_id="plan", messages=[message], label=None), seed=0, scratch={})
        made: list[Call] = []
        try:
            for place, step in enumerate(plan.steps):
                call = await self._call(step, [one.result for one in made], info)
                made.append(replace(call, result=instead[1]) if instead and instead[0] == place else call)
        finally:
            await info.close()
        return made

    async def _call(self, step: Step, results: Sequence[str], info: EpisodeInfo) -> Call:
        arguments = self._typed(step.tool, filled_arguments(step.arguments, results))
        problem = self._judge.unknown_tool(step.tool) or self._judge.wrong_arguments(step.tool, arguments)
        if problem:
            raise PlanFailed(problem)
        try:
            text = (await self._box.call(step.tool, dict(arguments), self._timeout_s, info)).text
        except (ToolError, ToolCrash, ToolsUnavailable) as error:
            raise PlanFailed(f"{step.tool}: {error}") from error
        answer = shortened(text, self._agent.max_result_chars)
        return Call(tool=step.tool, arguments=arguments, answer=answer, result=_result(step, answer, results))

    def _typed(self, tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Arguments with the numbers and other values that texts stand for where a tool wants no text."""
        properties = self.parameters.get(tool, {}).get("properties", {})
        wanted = {name: properties.get(name, {}).get("type") for name in arguments}
        return {
            name: _value(value) if isinstance(value, str) and wanted[name] not in (None, "string") else value
            for name, value in arguments.items()
        }


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _result(step: Step, answer: str, results: Sequence[str]) -> str:
    if not step.result:
        return answer.strip()
    before, after = (re.escape(part) for part in filled(step.result, results).split(HERE))
    found = re.search(f"{before}(.+?){after}" if after else f"{before}(.+)", answer)
    if found is None:
        raise PlanFailed(f"{step.tool}: the answer has no words like {step.result!r}: {answer[:80]!r}")
    return found[1].strip()
