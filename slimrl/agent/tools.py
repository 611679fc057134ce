"""Tools: plain Python functions that the model may call by name.

A function's annotations and docstring (Google style, with an `Args:` section) make the JSON schema that the model is
shown. A synchronous function runs in a thread of its own, so that one that hangs holds up neither the others nor the
end of the process; Python cannot end it, though, and it goes on in the background when its deadline has passed.
"""

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pydantic
from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

from slimrl.data.import_path import resolve
from slimrl.data.threads import in_thread, reportable


class ToolError(Exception):
    """A call that cannot be answered; the model is told why and goes on."""


class ToolBroken(Exception):
    """A tool failed in a way that it did not foresee; the trajectory is worthless."""


@dataclass(frozen=True, kw_only=True)
class Tool:
    """One function that the model may call."""

    name: str
    function: Callable[..., Any]
    schema: dict[str, Any]
    """As the chat template takes it: {"type": "function", "function": {"name", "description", "parameters"}}."""


def make_tool(function: Callable[..., Any]) -> Tool:
    """A tool of a function.

    Raises:
        ValueError: it is no function, or its annotations or its docstring do not say enough for a schema.
    """
    if not inspect.isroutine(function):
        raise ValueError(f"{function!r}: a tool is a function")
    try:
        schema = get_json_schema(function)
        checked = pydantic.validate_call(function)
    except (DocstringParsingException, TypeHintParsingException, NameError) as error:
        raise ValueError(f"tool {function.__module__}:{function.__qualname__}: {error}") from error
    except pydantic.PydanticUserError as error:
        raise ValueError(f"tool {function.__module__}:{function.__qualname__}: {error.message}") from error
    schema["function"].pop("return", None)  # not part of the schema that models are trained with
    return Tool(name=schema["function"]["name"], function=checked, schema=schema)


class ToolBox:
    """The tools of a run.

    Args:
        tools: in the order in which the model is shown them.

    Raises:
        ValueError: two of them have one name.
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = {tool.name: tool for tool in tools}
        if len(self._tools) < len(tools):
            raise ValueError(f"two tools have one name: {', '.join(tool.name for tool in tools)}")

    @classmethod
    def from_import_paths(cls, paths: Sequence[str]) -> "ToolBox":
        """Raises ValueError for a path that names no function, or one that makes no tool."""
        return cls([make_tool(resolve(path)) for path in paths])

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return [tool.schema for tool in self._tools.values()]

    async def call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> str:
        """The tool's answer as text (`str` of what the function returns).

        Raises:
            ToolError: no such tool, arguments that do not fit, the tool's own ToolError or ValueError, or no answer
                in time.
            ToolBroken: the tool raised anything else.
        """
        tool = self._tools.get(name)
        if tool is None:
            known = ", ".join(self._tools) or "none"
            raise ToolError(f"unknown tool {name}; known: {known}")
        call = functools.partial(tool.function, **arguments)
        running: asyncio.Future[Any]
        if inspect.iscoroutinefunction(inspect.unwrap(tool.function)):
            running = asyncio.ensure_future(_await(call))
        else:
            running = in_thread(call)
        try:
            await asyncio.wait([running], timeout=timeout_s)
        finally:
            done = running.done()
            if not done:
                running.cancel()
        if not done:
            raise ToolError(f"{name} gave no answer within {timeout_s:g} s")
        return _answer(name, running)


async def _await(call: Callable[[], Awaitable[Any]]) -> Any:
    try:
        return await call()
    except SystemExit as error:
        # A task that ends by it ends the event loop, and the run with it.
        raise reportable(error) from error


def _answer(name: str, done: "asyncio.Future[Any]") -> str:
    if done.cancelled():
        raise ToolBroken(f"tool {name}: it cancelled itself")
    error = done.exception()
    match error:
        case None:
            return str(done.result())
        case pydantic.ValidationError():
            problems = (f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
            raise ToolError("; ".join(problems)) from error
        case ToolError() | ValueError():
            raise ToolError(str(error)) from error
        case _:
            raise ToolBroken(f"tool {name}: {error!r}") from error
