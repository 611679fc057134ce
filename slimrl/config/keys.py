"""The keys of a recipe, from the schema: their types, and which are sections."""

import dataclasses
from collections.abc import Collection, Iterable, Iterator
from enum import Enum
from types import UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from slimrl.config.schema.recipe import Recipe

EXTENDS = "extends"
"""Key that names the files from which a file inherits; not a setting."""

PASSTHROUGH = ("trainer.megatron", "critic.trainer.megatron", "rollout.sglang", "teacher.sglang")
NAME = "NAME"
"""Placeholder in keys of the schema for a name that a recipe chooses: `reward.parts.NAME.weight`."""
WHOLE = ("agent.environment_args", "agent.command_env", "agent.command_task_args")
"""Mappings that are values, which a later file replaces whole, and no sections"""


def _schema_types(cls: type, prefix: str) -> dict[str, Any]:
    types: dict[str, Any] = {}
    for name, annotation in get_type_hints(cls).items():
        key = f"{prefix}.{name}".lstrip(".")
        types[key] = annotation
        if dataclasses.is_dataclass(annotation):
            types |= _schema_types(cast(type, annotation), key)
        elif (inner := named_type(annotation)) is not None:
            types |= {f"{key}.{NAME}": inner, **_schema_types(inner, f"{key}.{NAME}")}
    return types


def named_type(annotation: Any) -> type | None:
    """The dataclass of a section of sections, `dict[str, dataclass]`; None for any other type."""
    inner = get_args(annotation)[-1] if get_origin(annotation) is dict else None
    return inner if isinstance(inner, type) and dataclasses.is_dataclass(inner) else None


KEY_TYPES = _schema_types(Recipe, "")
"""Dotted key -> annotated type of every section and every value."""
NAMED_SECTIONS = tuple(key for key, kind in KEY_TYPES.items() if named_type(kind) is not None)
"""Sections of sections with names that a recipe chooses, all of one type."""
FREE_SECTIONS = tuple(
    key for key, kind in KEY_TYPES.items() if get_origin(kind) is dict and key not in (*NAMED_SECTIONS, *WHOLE)
)
"""Sections whose keys the schema does not name."""


def type_text(kind: Any) -> str:
    """A type as Python writes it: `int | None`."""
    if get_origin(kind) in (Union, UnionType):
        return " | ".join(map(type_text, get_args(kind)))
    text = kind.__name__ if type(kind) is type else str(kind)
    return text.replace("typing.", "").replace("NoneType", "None")


def type_of(key: str) -> Any:
    """Annotated type of a setting, or of a value in a free section."""
    key = schema_key(key)
    return KEY_TYPES[key] if key in KEY_TYPES else get_args(KEY_TYPES[key.rpartition(".")[0]])[1]


def schema_key(key: str) -> str:
    """The key with NAME in place of a name that the recipe chose: `reward.parts.math` is `reward.parts.NAME`."""
    for section in NAMED_SECTIONS:
        if key.startswith(f"{section}."):
            _, dot, rest = key.removeprefix(f"{section}.").partition(".")
            return f"{section}.{NAME}{dot}{rest}"
    return key


def is_removable(key: str) -> bool:
    """Whether null as a key's value removes what another recipe gave there."""
    section = key.rpartition(".")[0]
    return section in NAMED_SECTIONS or (section in FREE_SECTIONS and section.startswith("data."))


def is_section(key: str) -> bool:
    key = schema_key(key)
    return key in FREE_SECTIONS or key in NAMED_SECTIONS or dataclasses.is_dataclass(KEY_TYPES.get(key))


def is_known(key: str) -> bool:
    key = schema_key(key)
    return key in KEY_TYPES or key.rpartition(".")[0] in FREE_SECTIONS


def keys_with_choice(section: str, value: Any) -> list[str]:
    """Settings of a section that have this value among their choices."""
    return [
        key
        for key, kind in KEY_TYPES.items()
        if key.rpartition(".")[0] == section
        and isinstance(kind, type)
        and issubclass(kind, Enum)
        and value in [member.value for member in kind]
    ]


def flatten(recipe: Recipe, given: Collection[str] = ()) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every setting in schema order; an empty free section is one entry.

    Settings that the critic has from the trainer are left out.

    Args:
        given: keys that a recipe gives, which are not left out.
    """
    settings = list(_flatten(recipe, ""))
    shared = {f"critic.{key}": value for key, value in settings if key.startswith("trainer.")}
    for key, value in settings:
        if key in given or key not in shared or shared[key] != value:
            yield key, value


def _flatten(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _flatten(getattr(value, field.name), f"{prefix}.{field.name}".lstrip("."))
    elif prefix in NAMED_SECTIONS and value:
        for name, inner in value.items():
            yield from _flatten(inner, f"{prefix}.{name}")
    elif schema_key(prefix) in FREE_SECTIONS and value:
        for name, inner in value.items():
            yield f"{prefix}.{name}", inner
    else:
        yield prefix, value


def nest(values: Iterable[tuple[str, Any]], into: dict[str, Any]) -> dict[str, Any]:
    """Set (dotted key, value) pairs in the nested dict `into`, and return it."""
    for key, value in values:
        *parents, name = key.split(".")
        section = into
        for parent in parents:
            section = section.setdefault(parent, {})
        section[name] = value
    return into
