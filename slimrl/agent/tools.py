"""Tools: plain Python functions that the model may call by name.

A function's annotations and docstring (Google style, with an `Args:` section) become the JSON schema that the model
sees. Not part of it are the parameters that the recipe gives (`agent.tool_args`), and those annotated with EpisodeInfo,
which get the calling episode, or SandboxPool, which get the run's sandbox.
A synchronous function runs in a thread, so one that hangs blocks neither the others nor the end of the process.
Python cannot end the thread: after its deadline it continues in the background.
"""

import asyncio
import functools
import inspect
import itertools
import json
import typing
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Protocol

import pydantic

from slimrl.agent.sandbox.pool import SandboxPool
from slimrl.agent.supplied import Supplied
from slimrl.agent.tool_answer import NotFinite, answer_text
from slimrl.agent.tool_schema import tool_schema
from slimrl.base.rows import BrokenRows
from slimrl.base.threads import ReusedThreads, reportable
from slimrl.config.import_path import parameters_of_type, resolve
from slimrl.config.signatures import docstring_problems
from slimrl.data.prompt import Prompt

ELLIPSIS = " ... "
"""Replaces the middle of a result that is too long."""
TYPES = "Use a text, a number, a boolean, a list, a dict, an enumeration, a dataclass, a TypedDict or a pydantic model"
CACHED_ANSWERS = 10_000
"""Largest number of cached answers of pure tools, in a process."""


class ToolError(Exception):
    """A call that cannot be answered; the model reads the message and continues."""


class ToolCrash(Exception):
    """A tool raised an unexpected exception; the trajectory fails."""


class ToolsUnavailable(Exception):
    """What tools need, such as a server, cannot be reached."""


class Closes(Protocol):
    async def close(self) -> None: ...


class EpisodeInfo(Supplied):
    """The episode that calls a tool. It may keep for later calls what is opened once, such as a session.

    Args:
        seed: of its trajectory; all randomness comes from it.
        scratch: of its trajectory; the reward finds it as `trajectory.scratch`.
    """

    def __init__(self, *, prompt: Prompt, seed: int, scratch: dict[str, Any]) -> None:
        self.prompt, self.seed, self.scratch = prompt, seed, scratch
        self._kept: dict[str, Any] = {}
        self._at_end = AsyncExitStack()
        self._opening = asyncio.Lock()

    async def kept[K: Closes](self, name: str, open_it: Callable[[], Awaitable[K]]) -> K:
        """What the first call with this name opened; it is closed when the episode ends."""
        async with self._opening:
            if name not in self._kept:
                self._kept[name] = await open_it()
                self._at_end.push_async_callback(self._kept[name].close)
            return self._kept[name]

    def forget(self, name: str) -> None:
        """Remove what was opened under this name, so that the next call opens it anew."""
        self._kept.pop(name, None)

    async def close(self) -> None:
        """Close what was kept, the last one first."""
        await self._at_end.aclose()


@dataclass(frozen=True, kw_only=True)
class ToolAnswer:
    text: str
    from_cache: bool = False
    is_error: bool = False


@dataclass(frozen=True, kw_only=True)
class ToolOptions:
    """Options of a tool, as its function's decorator `tool` gives them."""

    pure: bool = False
    """Whether the answer follows from the arguments alone, so that an answer of the same run is given again."""
    retries: int = 0
    """Number of further attempts after an exception that is neither a ToolError nor a ValueError"""
    recipe_only: tuple[str, ...] = ()
    """Names of parameters that only the recipe gives; without it they have their defaults"""


def tool[F: Callable[..., Any]](
    *, pure: bool = False, retries: int = 0, recipe_only: Sequence[str] = ()
) -> Callable[[F], F]:
    """Decorator of a function that is a tool with options; one without options needs no decorator.

    Args:
        pure: its answer follows from its arguments alone, so an answer of the same run is given again.
        retries: further attempts after an exception that is neither a ToolError nor a ValueError.
        recipe_only: parameters that the model is never shown. The recipe may give them, else they have their defaults.
    """

    def mark(function: F) -> F:
        options = ToolOptions(pure=pure, retries=retries, recipe_only=tuple(recipe_only))
        function.tool_options = options  # type: ignore[attr-defined]
        return function

    return mark


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that the model may call."""

    name: str
    function: Callable[..., Any]
    schema: dict[str, Any]
    """Schema for the chat template: {"type": "function", "function": {"name", "description", "parameters"}}."""
    options: ToolOptions = ToolOptions()
    info_parameters: Sequence[str] = ()
    """Names of the parameters that get the EpisodeInfo"""
    sandbox_parameters: Sequence[str] = ()
    """Names of the parameters that get the SandboxPool"""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that every call has"""


def make_tool(function: Callable[..., Any], arguments: Mapping[str, Any] | None = None) -> Tool:
    """Make a tool from a function.

    Args:
        arguments: by name; the model is not shown those of the function's parameters.

    Raises:
        ValueError: it is not a function, or its annotations and docstring are not enough for a schema.
    """
    if not inspect.isroutine(function):
        raise ValueError(f"{function!r}: a tool is a function")
    options = getattr(function, "tool_options", ToolOptions())
    if problem := _unresolved(function):
        raise ValueError(f"tool {function.__module__}:{function.__qualname__}: {problem}")
    try:
        info, sandbox = (parameters_of_type(function, kind) for kind in (EpisodeInfo, SandboxPool))
        _refuse_open_parameters(function)
        parameters = inspect.signature(function).parameters
        fixed = {name: parameters[name].default for name in options.recipe_only}
        fixed |= {name: value for name, value in (arguments or {}).items() if name in parameters}
        hidden = [*info, *sandbox, *fixed]
        _refuse_docstring(function, hidden)
        schema = tool_schema(function, hidden)
        checked = pydantic.validate_call(function)
    except NameError as error:
        raise ValueError(f"tool {function.__module__}:{function.__qualname__}: {error}") from error
    except pydantic.PydanticUserError as error:
        said = _unknown_type(function) or error.message
        raise ValueError(f"tool {function.__module__}:{function.__qualname__}: {said}") from error
    if info and options.pure:
        raise ValueError(f"tool {function.__module__}:{function.__qualname__}: is not pure, since it gets the episode")
    if typing.get_type_hints(function).get("return") in (bytes, bytearray, memoryview):
        raise ValueError(f"tool {function.__module__}:{function.__qualname__}: returns bytes, which are no text")
    return Tool(
        name=schema["function"]["name"],
        function=checked,
        schema=schema,
        options=options,
        info_parameters=info,
        sandbox_parameters=sandbox,
        fixed=fixed,
    )


def _unresolved(function: Callable[..., Any]) -> str | None:
    """The problem of the first annotation that names what the function's module does not have; None without one."""
    given = inspect.unwrap(function)
    for name, hint in getattr(given, "__annotations__", {}).items():
        try:
            typing.get_type_hints(SimpleNamespace(__annotations__={name: hint}), getattr(given, "__globals__", {}))
        except (NameError, AttributeError, TypeError, SyntaxError) as error:
            what = "what it returns" if name == "return" else f"its parameter {name}"
            said = hint if isinstance(hint, str) else inspect.formatannotation(hint)
            return (
                f"the annotation {said} of {what} cannot be resolved: {error}. Import or define it in the tool's module"
            )
    return None


def _refuse_docstring(function: Callable[..., Any], hidden: Collection[str]) -> None:
    shown = [name for name in inspect.signature(function).parameters if name not in hidden]
    told = inspect.getdoc(function)
    if told and (problem := next(docstring_problems(told, shown), None)):
        raise ValueError(f"tool {function.__module__}:{function.__qualname__}: {problem}")


def _unknown_type(function: Callable[..., Any]) -> str | None:
    """The problem of the first parameter whose annotation is a class that no schema describes; None without one."""
    hints = {name: hint for name, hint in typing.get_type_hints(function).items() if name != "return"}
    for name, hint in hints.items():
        try:
            pydantic.TypeAdapter(hint)
        except pydantic.PydanticUserError:
            kind = getattr(hint, "__name__", str(hint))
            return f"its parameter {name} is annotated with {kind}, which no schema can describe to the model. {TYPES}"
    return None


def _refuse_open_parameters(function: Callable[..., Any]) -> None:
    for each in inspect.signature(function).parameters.values():
        if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
            raise ValueError(
                f"tool {function.__module__}:{function.__qualname__}: has the parameter {each}, which no schema can "
                "describe to the model"
            )


def tools_of(paths: Sequence[str], arguments: Mapping[str, Any] | None = None) -> list[Tool]:
    """Raises ValueError: paths name no functions, or functions are not fit for tools; names all of them."""
    tools, problems = [], []
    for path in paths:
        try:
            tools.append(make_tool(resolve(path), arguments))
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise BrokenRows(problems, "tools")
    return tools


def check_arguments(tools: Sequence[Tool], arguments: Mapping[str, Any]) -> None:
    """Raises ValueError for an argument of the recipe that none of the tools has."""
    unknown = set(arguments) - {name for tool in tools for name in tool.fixed}
    if unknown:
        raise ValueError(f"no tool has a parameter {', '.join(sorted(unknown))}, which agent.tool_args gives")


class ToolBox:
    """The tools of a run.

    Args:
        tools: in the order in which the model sees them.
        sandbox: for those that ask for it.

    Raises:
        ValueError: two of them have one name.
    """

    def __init__(self, tools: Sequence[Tool], sandbox: SandboxPool | None = None) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._sandbox = sandbox
        self._cache: OrderedDict[str, str] = OrderedDict()
        """Answers of pure tools, the oldest first"""
        self._threads = ReusedThreads()
        if len(self._tools) < len(tools):
            raise ValueError(f"two tools have one name: {', '.join(tool.name for tool in tools)}")

    @classmethod
    def from_import_paths(
        cls, paths: Sequence[str], arguments: Mapping[str, Any] | None = None, sandbox: SandboxPool | None = None
    ) -> "ToolBox":
        """
        Args:
            arguments: of the recipe, by name; each of them is a parameter of one of the tools at least.

        Raises:
            ValueError: a path names no function, a function is not fit for a tool, or an argument is of none of them.
        """
        tools = tools_of(paths, arguments)
        check_arguments(tools, arguments or {})
        return cls(tools, sandbox)

    def open(self) -> None:
        """Connect what the tools need, before the first episode; raises ToolsUnavailable. Functions need nothing."""

    def close(self) -> None:
        """Close what `open` has opened, after the last episode."""

    async def for_episode(self) -> "ToolBox":
        """The tools of one episode, closed by `end_episode`; raises ToolsUnavailable."""
        return self

    async def end_episode(self) -> None:
        return

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return [tool.schema for tool in self._tools.values()]

    @property
    def caches(self) -> bool:
        """Whether answers are cached: at least one tool is pure."""
        return any(tool.options.pure for tool in self._tools.values())

    async def call(
        self, name: str, arguments: dict[str, Any], timeout_s: float, info: EpisodeInfo | None = None
    ) -> ToolAnswer:
        """The tool's answer as text, see `answer_text`.

        Args:
            timeout_s: deadline of each attempt.

        Raises:
            ToolError: an unknown tool, wrong arguments, the tool's own ToolError or ValueError, NaN or infinity in what
                it returned, or no answer in time.
            ToolCrash: the tool raised anything else, or returned what is no text, also in its last attempt.
        """
        tool = self._tools.get(name)
        if tool is None:
            known = ", ".join(self._tools) or "none"
            raise ToolError(f"unknown tool {name}; known: {known}")
        key = json.dumps([name, arguments], sort_keys=True, default=repr) if tool.options.pure else ""
        if key in self._cache:
            self._cache.move_to_end(key)
            return ToolAnswer(text=self._cache[key], from_cache=True)
        ours = {**dict.fromkeys(tool.info_parameters, info), **dict.fromkeys(tool.sandbox_parameters, self._sandbox)}
        text = await _call(tool, {**arguments, **tool.fixed, **ours}, timeout_s, self._threads)
        if tool.options.pure:
            self._cache[key] = text
            if len(self._cache) > CACHED_ANSWERS:
                self._cache.popitem(last=False)
        return ToolAnswer(text=text)


async def _call(tool: Tool, arguments: dict[str, Any], timeout_s: float, threads: ReusedThreads) -> str:
    for attempt in itertools.count():
        try:
            return await _attempt(tool, arguments, timeout_s, threads)
        except ToolCrash:
            if attempt >= tool.options.retries:
                raise
    raise AssertionError("unreachable")


async def _attempt(tool: Tool, arguments: dict[str, Any], timeout_s: float, threads: ReusedThreads) -> str:
    call = functools.partial(tool.function, **arguments)
    running: asyncio.Future[Any]
    if inspect.iscoroutinefunction(inspect.unwrap(tool.function)):
        running = asyncio.ensure_future(_await(call))
    else:
        running = threads.run(call)
    try:
        done, _ = await asyncio.wait([running], timeout=timeout_s)
    finally:
        # Does nothing to a call that has ended.
        running.cancel()
    if not done:
        raise ToolError(f"{tool.name} gave no answer within {timeout_s:g} s")
    return _answer(tool.name, running)


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
            try:
                return answer_text(done.result())
            except NotFinite as not_finite:
                raise ToolError(f"{name} {not_finite}") from not_finite
            except ValueError as unsayable:
                raise ToolCrash(f"tool {name}: {unsayable}") from unsayable
        case pydantic.ValidationError():
            problems = (f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
            raise ToolError("; ".join(problems)) from error
        case ToolError() | ValueError():
            raise ToolError(str(error)) from error
        case _:
            raise ToolCrash(f"tool {name}: {error!r}") from error
