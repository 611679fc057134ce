"""A recipe as text: the resolved YAML of a run folder, and the table of `slimrl config show`."""

import json
from collections.abc import Iterator
from enum import Enum
from typing import Any

import yaml

from slimrl.config.interpolation import escaped, is_reference
from slimrl.config.keys import flatten, nest
from slimrl.config.load import LoadedRecipe
from slimrl.config.schema.types import MISSING


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


def resolved_dict(loaded: LoadedRecipe) -> dict[str, Any]:
    """Every setting as nested plain Python, as a recipe writes it, without the mandatory ones that are missing.

    A setting from the environment is its reference: no secret is written down, and a later run reads it again.
    """
    references = loaded.environment.references
    return nest(
        (
            (key, references.get(key, escaped(_plain(value))))
            for key, value in flatten(loaded.recipe, loaded.provenance)
            if value != MISSING
        ),
        {},
    )


def dump_resolved(loaded: LoadedRecipe) -> str:
    """YAML of every setting; load_recipe reads it back as an equal recipe."""
    return yaml.safe_dump(resolved_dict(loaded), sort_keys=False, allow_unicode=True)


def show(loaded: LoadedRecipe) -> list[tuple[str, str, str]]:
    """(key, value, origin) of every setting in schema order; `-` for a missing value, the reference for one from the
    environment."""
    references = loaded.environment.references
    return [
        (key, "-" if value == MISSING else _text(references.get(key, _plain(value))), loaded.provenance[key])
        for key, value in flatten(loaded.recipe, loaded.provenance)
    ]


def _text(value: Any) -> str:
    """A text as it is, all else as a recipe writes it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def changed_settings(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """`key: old -> new` of every setting that differs between two results of resolved_dict.

    If one of the two is a reference, the other may be its secret value and is not shown.
    """
    for name in sorted({*before, *now}):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from changed_settings(old, new, f"{prefix}{name}.")
        elif old != new:
            if is_reference(old) != is_reference(new):
                old, new = (value if is_reference(value) else "(another value)" for value in (old, new))
            yield f"{prefix}{name}: {old} -> {new}"
