"""A recipe as text: the resolved YAML of a run folder, and the table of `slimrl config show`."""

from collections.abc import Iterator
from enum import Enum
from typing import Any

import yaml
from omegaconf import MISSING

from slimrl.config.interpolation import escaped
from slimrl.config.keys import flatten, nest
from slimrl.config.load import LoadedRecipe
from slimrl.config.schema import Recipe


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


def resolved_dict(recipe: Recipe) -> dict[str, Any]:
    """Every setting as nested plain Python, as a recipe writes it; what was neither given nor needed is left out."""
    return nest(((key, escaped(_plain(value))) for key, value in flatten(recipe) if value != MISSING), {})


def dump_resolved(recipe: Recipe) -> str:
    """YAML of every setting, which load_recipe reads back as an equal recipe."""
    return yaml.safe_dump(resolved_dict(recipe), sort_keys=False, allow_unicode=True)


def show(loaded: LoadedRecipe) -> list[tuple[str, str, str]]:
    """(key, value, where it came from) of every setting in schema order; `-` for a value that is not given."""
    return [
        (key, "-" if value == MISSING else str(_plain(value)), loaded.provenance[key])
        for key, value in flatten(loaded.recipe)
    ]


def changed_settings(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """`key: old -> new` of every setting in which two results of resolved_dict differ."""
    for name in sorted({*before, *now}):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from changed_settings(old, new, f"{prefix}{name}.")
        elif old != new:
            yield f"{prefix}{name}: {old} -> {new}"
