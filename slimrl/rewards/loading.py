"""The rewards of a recipe, resolved from their import paths and bound to their arguments."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

from slimrl.config.import_path import parameters_of_type, resolve
from slimrl.config.problems import suggestion
from slimrl.config.reward_rules import reward_parts
from slimrl.config.schema.reward import RewardConfig, RewardPartConfig
from slimrl.data.prompt import Prompt
from slimrl.rewards.parts import Part, PartsReward, SingleReward
from slimrl.rewards.retries import NO_RETRIES, Retries


class Supplies(dict[type, Any]):
    """What the run has for rewards that ask for it: an argument for each parameter annotated with the type. A reward
    that loads another one asks for the Supplies themselves."""


NO_SUPPLIES = Supplies()


@dataclass(frozen=True, kw_only=True)
class Rewards:
    """The reward functions that score trajectories."""

    function: SingleReward | PartsReward
    """Reward of a trajectory and its prompt"""
    group: Sequence[Part] = ()
    """Parts that are rewards of groups: functions of a prompt's trajectories and the prompt"""
    retries: Retries = NO_RETRIES
    parts: Sequence[Part] = ()
    """All parts of both, which have to be started and closed"""


def load_rewards(
    settings: RewardConfig, get: Callable[[str, Callable[[], Any]], Any], supplies: Supplies = NO_SUPPLIES
) -> Rewards | None:
    """The rewards of a recipe; None if one could not be loaded.

    Args:
        get: calls its second argument, for the setting that the first one names; returns None for a ValueError, which
            it keeps.
    """
    errors = get("reward.retry_on", lambda: tuple(map(load_exception, settings.retry_on)))
    whole = RewardPartConfig(function=settings.function)
    given = [("reward.function", whole)] if settings.function else []
    given += [(f"{key}.function", part) for key, part in reward_parts(settings)]
    parts: dict[str, Part | None] = {
        key: get(key, partial(load_part, "" if part is whole else key.split(".")[2], part, _subject(key), supplies))
        for key, part in given
    }
    loaded = {key: part for key, part in parts.items() if part is not None}
    if errors is None or len(loaded) < len(parts):
        return None
    retries = Retries(limit=settings.retries, errors=errors)
    return Rewards(
        function=_function(settings, loaded, retries),
        group=list(_of_section("group", loaded)),
        retries=retries,
        parts=list(loaded.values()),
    )


def _function(settings: RewardConfig, loaded: dict[str, Part], retries: Retries) -> SingleReward | PartsReward:
    if settings.function:
        return SingleReward(part=loaded["reward.function"], retries=retries)
    return PartsReward(
        parts=list(_of_section("parts", loaded)),
        by_name={part.name: part for part in _of_section("by_name", loaded)},
        name_key=settings.name_key,
        retries=retries,
    )


def _of_section(section: str, loaded: dict[str, Part]) -> Iterator[Part]:
    return (part for key, part in loaded.items() if key.startswith(f"reward.{section}."))


def _subject(key: str) -> str:
    return "trajectories" if key.startswith("reward.group.") else "trajectory"


def load_part(
    name: str, settings: RewardPartConfig, subject: str = "trajectory", supplies: Supplies = NO_SUPPLIES
) -> Part:
    """A part of the reward; a class is made with the arguments, a function called with them.

    Args:
        subject: name of the first argument that the function gets, before the prompt.

    Raises:
        ValueError: the import path leads nowhere, the function or class takes other arguments, or the class cannot
            be made with their values, or its `start` or `close` is not asynchronous.
    """
    path = settings.function
    target = resolve(path, classes=True)
    given = {**supplies, Supplies: supplies}
    supplied = {name: value for kind, value in given.items() for name in parameters_of_type(target, kind)}
    arguments = {**supplied, **settings.args}
    if isinstance(target, type):
        _check_call(path, target, (), arguments)
        try:
            function = target(**arguments)
        except Exception as error:
            # A task's own code may raise anything, such as for a file that is missing.
            raise ValueError(f"{path}: could not be made: {type(error).__name__}: {error}") from error
        for called in ("start", "close"):
            method = getattr(function, called, None)
            if callable(method) and not inspect.iscoroutinefunction(method):
                raise ValueError(f"{path}: its {called} is not `async def`, so it would not be called")
        if not callable(function):
            raise ValueError(f"{path}: an object of this class cannot be called; it has no __call__")
        _check_call(path, function, (subject, "prompt"), {})
    else:
        _check_call(path, target, (subject, "prompt"), arguments)
        function = partial(target, **arguments) if arguments else target
    return Part(
        name=name,
        function=function,
        path=path,
        weight=settings.weight,
        cap=settings.cap,
        verified=settings.verified,
    )


def load_exception(path: str) -> type[Exception]:
    """Raises ValueError if the import path does not lead to a class of exceptions."""
    found = resolve(path, classes=True)
    if not isinstance(found, type) or not issubclass(found, Exception):
        raise ValueError(f"{path}: is no class of exceptions")
    return found


def refuse_unknown_names(prompts: Sequence[Prompt], settings: RewardConfig) -> list[str]:
    """`file:line: problem` of each prompt whose metadata names no part of `reward.by_name`, or none where one is
    needed."""
    if not settings.by_name:
        return []
    key, problems = f"metadata.{settings.name_key}", []
    for prompt in prompts:
        name = prompt.metadata.get(settings.name_key)
        if name is None and not settings.parts:
            problems.append(f"{prompt.source}: {key} is missing; it names the prompt's part of reward.by_name")
        elif name is not None and (not isinstance(name, str) or name not in settings.by_name):
            known = ", ".join(settings.by_name)
            meant = suggestion(str(name), settings.by_name)
            problems.append(f"{prompt.source}: {key} is {name!r}; reward.by_name has {known}.{meant}")
    return problems


def refuse_unjudged(prompts: Sequence[Prompt], rewards: Rewards) -> list[str]:
    """`file:line: problem` of each prompt that a part of its reward refuses by its method `check_prompt`."""
    problems = []
    for prompt in prompts:
        for part in (*rewards.function.parts_of(prompt), *rewards.group):
            check = getattr(part.function, "check_prompt", None)
            try:
                if check is not None:
                    check(prompt)
            except ValueError as error:
                problems.append(f"{prompt.source}: {part.title}: {error}")
    return problems


def _check_call(path: str, target: Callable[..., Any], places: Sequence[str], arguments: dict[str, Any]) -> None:
    """Raises ValueError if the target cannot be called with these arguments, as far as its signature is known."""
    method = inspect.getattr_static(type(target), "__call__", None)
    is_ours = isinstance(method, FunctionType | staticmethod | classmethod)
    try:
        # Of an object whose __call__ is static, Python would leave out the first parameter.
        signature = inspect.signature(target.__call__ if is_ours else target)  # type: ignore[operator]
    except ValueError as error:
        if is_ours:
            raise ValueError(f"{path}: its __call__ has no parameter self") from error
        return  # some functions written in C have none
    try:
        signature.bind(*places, **arguments)
    except TypeError as error:
        said = ", ".join([*places, *(f"{name}=..." for name in arguments)])
        raise ValueError(f"{path}: cannot be called with ({said}): {error}") from error
