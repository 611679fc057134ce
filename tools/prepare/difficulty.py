"""What `--difficulty` says of tasks of reasoning-gym: levels of their curricula, settings of their configurations."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from pydantic import TypeAdapter, ValidationError

from slimrl.config.problems import suggestion

OWN = ("seed", "size")
"""Fields of each configuration that the command sets itself"""
SCALARS = (int, float, bool, str)


@dataclass(frozen=True, kw_only=True)
class Difficulty:
    levels: Sequence[int] = ()
    """Levels of the curricula, ascending; empty for the tasks' defaults"""
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Task -> name of a field of its configuration -> its value as given"""


def read_difficulty(text: str, tasks: Sequence[str]) -> Difficulty:
    """`2`, `0,1,2`, `max_terms=3,max_digits=1`, `1,gcd.max_value=30`.

    Raises:
        ValueError: it has another form, names a task that is not among `tasks`, or says something twice.
    """
    levels: list[int] = []
    settings: dict[str, dict[str, str]] = {task: {} for task in tasks}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not equals:
            if not item.isdecimal():
                raise ValueError(f"--difficulty: {item!r} is neither a level such as 2 nor NAME=VALUE")
            levels.append(int(item))
            continue
        task, dot, own_name = name.partition(".")
        if dot and task not in tasks:
            raise ValueError(f"--difficulty: {item}: {task} is none of the tasks.{suggestion(task, tasks)}")
        for one in [task] if dot else tasks:
            if settings[one].setdefault(own_name if dot else name, value) != value:
                raise ValueError(f"--difficulty: {name} has two values")
    if levels != sorted(set(levels)):
        raise ValueError(f"--difficulty: the levels {', '.join(map(str, levels))} are not in ascending order")
    return Difficulty(levels=levels, settings=settings)


def configured(task: str, config: type, curriculum: Any, level: int | None, given: Mapping[str, str]) -> dict[str, Any]:
    """Arguments of a task's configuration, without its seed and size.

    Args:
        config: its configuration, a dataclass.
        curriculum: an object of its curriculum; None if it has none.
        level: None for the defaults.

    Raises:
        ValueError: it has no such level or setting, or the setting no such value.
    """
    arguments = {} if level is None else _of_level(task, curriculum, level)
    fields = {each.name: each.type for each in dataclasses.fields(config) if each.name not in OWN}
    for name, value in given.items():
        if name not in fields:
            known = ", ".join(fields) or "none"
            raise ValueError(f"--difficulty: {task} has no {name}; it has {known}.{suggestion(name, fields)}")
        arguments[name] = _value(f"--difficulty: {task}.{name}", value, fields[name])
    try:
        checked = config(**arguments)
        checked.validate()
    except (AssertionError, ValueError, TypeError) as error:
        said = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        raise ValueError(f"--difficulty: {task} refuses {said}: {error}") from error
    return arguments


def _of_level(task: str, curriculum: Any, level: int) -> dict[str, Any]:
    top = (
        -1 if curriculum is None else max((len(each.levels) for each in curriculum.attributes.values()), default=0) - 1
    )
    if level > top:
        has = f"its levels are 0 to {top}" if top >= 0 else "it has no levels"
        raise ValueError(f"--difficulty: {task} has no level {level}; {has}")
    curriculum.set_global_level(level)
    made = curriculum.generate_configuration()
    # Only what the curriculum says: the rest are defaults.
    return {each.name: getattr(made, each.name) for each in dataclasses.fields(made) if each.name not in OWN}


def _value(what: str, text: str, kind: Any) -> Any:
    if not ({kind, *get_args(kind)} & set(SCALARS) or all(isinstance(one, str) for one in get_args(kind) or [0])):
        raise ValueError(f"{what} is of type {getattr(kind, '__name__', kind)}, which cannot be set here")
    try:
        return TypeAdapter(kind).validate_strings(text)
    except ValidationError as error:
        raise ValueError(f"{what}: {text!r}: {error.errors()[0]['msg']}") from error
