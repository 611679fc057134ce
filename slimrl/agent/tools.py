"""Tools: plain Python functions that the model may call by name.

A function's annotations and docstring (Google style, with an `Args:` section) become the JSON schema that the model
sees. A synchronous function runs in its own thread, so one that hangs blocks neither the others nor the end of the
process. Python cannot end the thread: after its deadline it continues in the background.
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

ELLIPSIS = " ... "
"""Replaces the middle of a result that is too long."""


class ToolError(Exception):
    """A call that cannot be answered; the model reads the message and continues."""


class ToolCrash(Exception):
    """A tool raised an unexpected exception; the trajectory fails."""


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that the model may call."""

    name: str
    function: Callable[..., Any]
    schema: dict[str, Any]
    """For the chat template: {"type": "function", "function": {"name", "description", "parameters"}}."""


def make_tool(function: Callable[..., Any]) -> Tool:
    """Make a tool from a function.

    Raises:
        ValueError: it is not a function, or its annotations and docstring are not enough for a schema.
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
        tools: in the order in which the model sees them.

    Raises:
        ValueError: two of them have one name.
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = {tool.name: tool for tool in tools}
        if len(self._tools) < len(tools):
            raise ValueError(f"two tools have one name: {', '.join(tool.name for tool in tools)}")

    @classmethod
    def from_import_paths(cls, paths: Sequence[str]) -> "ToolBox":
        """Raises ValueError for a path that names no function, or a function that is not fit for a tool."""
        return cls([make_tool(resolve(path)) for path in paths])

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return [tool.schema for tool in self._tools.values()]

    async def call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> str:
        """The tool's answer as text (`str` of what the function returns).

        Raises:
            ToolError: an unknown tool, wrong arguments, the tool's own ToolError or ValueError, or no answer in time.
            ToolCrash: the tool raised anything else.
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
            done, _ = await asyncio.wait([running], timeout=timeout_s)
        finally:
            # Does nothing to a call that has ended.
            running.cancel()
        if not done:
            raise ToolError(f"{name} gave no answer within {timeout_s:g} s")
        return _answer(name, running)


def shortened(text: str, limit: int) -> str:
    """A result of at most `limit` characters, without its middle if it was longer."""
    if len(text) <= limit:
        return text
    head = (limit - len(ELLIPSIS)) // 2
    return text[:head] + ELLIPSIS + text[len(text) - (limit - len(ELLIPSIS) - head) :]


async def _await(call: Callable[[], Awaitable[Any]]) -> Any:
    try:
        return await call()
    except SystemExit as error:
        # A SystemExit in a task would end the event loop, and the run with it.
        raise reportable(error) from error


def _answer(name: str, done: "asyncio.Future[Any]") -> str:
    if done.cancelled():
        raise ToolCrash(f"tool {name}: cancelled itself")
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
            raise ToolCrash(f"tool {name}: {error!r}") from error
