r"""`${...}` in a recipe stands for another setting, `${oc.env:NAME}` for a variable of the environment.

`\${` writes the two characters themselves, as OmegaConf reads it: before `${` each pair of backslashes is one of them,
and one that is left over makes what follows plain text.
"""

import re
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException

from slimrl.config.keys import nest
from slimrl.config.problems import Problem
from slimrl.config.schema import Recipe
from slimrl.config.yaml_source import Entry

OPENING = "${"
LITERALLY = r"To write ${ itself, write \${."


def is_interpolated(value: Any) -> bool:
    """Whether a value as written holds `${`, escaped or not."""
    return OPENING in str(value)


def resolve_entries(known: dict[str, Entry], problems: list[Problem]) -> dict[str, Any]:
    """Values with `${...}` replaced; a value that cannot be resolved becomes a problem and is left out."""
    readable = {key: entry for key, entry in known.items() if _is_readable(entry, problems)}
    if not any(is_interpolated(entry.value) for entry in readable.values()):
        return {key: entry.value for key, entry in readable.items()}
    defaults = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.structured(Recipe)))
    plain = OmegaConf.create(nest(((key, entry.value) for key, entry in readable.items()), defaults))
    values: dict[str, Any] = {}
    for key, entry in readable.items():
        if not is_interpolated(entry.value):
            values[key] = entry.value
            continue
        try:
            value = OmegaConf.select(plain, key, throw_on_missing=True)
            values[key] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except (OmegaConfBaseException, RecursionError) as error:
            problems.append(_problem(entry, _reason(error)))
    return values


def escaped(value: Any) -> Any:
    """A value as a recipe writes it: read again, its texts are the same."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    if isinstance(value, list):
        return [escaped(item) for item in value]
    return {name: escaped(item) for name, item in value.items()} if isinstance(value, dict) else value


def without_openings(value: Any) -> Any:
    """The value with `$` for each `${`: of the same type, and nothing that OmegaConf would follow."""
    if isinstance(value, str):
        return value.replace(OPENING, "$")
    if isinstance(value, list):
        return [without_openings(item) for item in value]
    return {name: without_openings(item) for name, item in value.items()} if isinstance(value, dict) else value


def _is_readable(entry: Entry, problems: list[Problem]) -> bool:
    """Whether OmegaConf can read the value; it reads a whole recipe or nothing of it."""
    if not is_interpolated(entry.value):
        return True
    try:
        OmegaConf.create({"value": entry.value})
    except GrammarParseError:
        problems.append(_problem(entry, "${ begins a reference, and this is none"))
        return False
    return True


def _reason(error: Exception) -> str:
    first = str(error).splitlines()[0].rstrip(".")
    return first.removeprefix("KeyError raised while resolving interpolation: ").strip('"')


def _problem(entry: Entry, reason: str) -> Problem:
    return Problem(where=entry.where, key=entry.key, message=f"{entry.value!r}: {reason}. {LITERALLY}")
