r"""`${...}` in a recipe stands for another setting, `${oc.env:NAME}` for a variable of the environment.

`\${` is the two characters themselves. As in OmegaConf, each pair of backslashes before `${` stands for one backslash,
and a single one left over makes what follows plain text.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from slimrl.config.keys import nest
from slimrl.config.problems import Problem
from slimrl.config.schema.recipe import Recipe
from slimrl.config.yaml_source import Entry

OPENING = "${"
LITERALLY = r"To write ${ itself, write \${."

SHORTEST_SECRET = 6
"""A shorter value of a variable is not hidden in messages."""

_RESOLVER = "oc.env"
_UNSET = "Environment variable"
_NUMBER = re.compile(r"[-+.0-9eE]+")
_REFERENCE = re.compile(r"(?<!\\)(?:\\\\)*\$\{")


def is_interpolated(value: Any) -> bool:
    """Whether a value as written holds `${`, escaped or not."""
    return OPENING in str(value)


@dataclass(frozen=True, kw_only=True)
class FromEnvironment:
    """Settings that are read from the environment, directly or through other settings: they may be secrets.

    Wherever settings are written down, the references stand in place of the values.
    """

    references: dict[str, Any] = field(default_factory=dict)
    """Dotted key -> the value as the recipe writes it."""
    variables: dict[str, str] = field(default_factory=dict)
    """Name -> value of each variable that was read."""

    def hide(self, text: str) -> str:
        """The message with references in place of the variables' values; short values and numbers are no secrets."""
        for name, value in sorted(self.variables.items(), key=lambda item: -len(item[1])):
            if len(value) >= SHORTEST_SECRET and not _NUMBER.fullmatch(value):
                for form in (value, repr(value)[1:-1]):
                    text = text.replace(form, f"${{{_RESOLVER}:{name}}}")
        return text


def resolve_entries(known: dict[str, Entry], problems: list[Problem]) -> tuple[dict[str, Any], FromEnvironment]:
    """Values with `${...}` replaced; a value that cannot be resolved becomes a problem and is left out."""
    environment = FromEnvironment()
    values = {key: entry.value for key, entry in known.items()}
    if not any(map(is_interpolated, values.values())):
        return values, environment
    # Its grammar takes a tenth of a second to import, and many recipes refer to nothing.
    from omegaconf import OmegaConf
    from omegaconf.errors import GrammarParseError, KeyValidationError, OmegaConfBaseException

    from slimrl.config.validation import converted

    for key, entry in known.items():
        try:
            OmegaConf.create({"value": entry.value})
        except GrammarParseError:
            problems.append(_problem(entry, "${ begins a reference, and this is not one"))
            del values[key]
        except KeyValidationError:
            problems.append(entry.problem("null is no key of a mapping; write a text."))
            del values[key]
    shared = {f"critic.{key}": value for key, value in values.items() if key.startswith("trainer.")}
    config = OmegaConf.create(nest((shared | values).items(), asdict(Recipe())))
    for key in [key for key, value in values.items() if is_interpolated(value)]:
        written = values.pop(key)
        with _noting_variables() as read:
            try:
                value = OmegaConf.select(config, key, throw_on_missing=True)
                found = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
                values[key] = converted(key, found)
            except (OmegaConfBaseException, RecursionError) as error:
                problems.append(_problem(known[key], str(error).splitlines()[0]))
        if read:
            environment.references[key] = written
            environment.variables.update(read)
    return values, environment


@contextmanager
def _noting_variables() -> Iterator[dict[str, str]]:
    """Variables that `${oc.env:NAME}` reads within the block, with their values."""
    from omegaconf import OmegaConf
    from omegaconf.resolvers import oc

    read: dict[str, str] = {}

    def note(name: str, *default: Any) -> Any:
        value = oc.env(name, *default)
        # A default is the recipe's own text.
        read[name] = os.environ.get(name, "")
        return value

    OmegaConf.register_resolver(_RESOLVER, note, replace=True, annotation_validation="off")
    try:
        yield read
    finally:
        OmegaConf.register_resolver(_RESOLVER, oc.env, replace=True, annotation_validation="off")


def is_reference(value: Any) -> bool:
    """Whether a value, as a recipe writes it, refers to something anywhere in it."""
    if isinstance(value, str):
        return _REFERENCE.search(value) is not None
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(map(is_reference, items))


def escaped(value: Any) -> Any:
    """The value as a recipe must write it to be read back with the same texts."""
    return _map_texts(lambda text: re.sub(r"(\\*)\$\{", r"\1\1\\${", text), value)


def _map_texts(function: Callable[[str], str], value: Any) -> Any:
    if isinstance(value, str):
        return function(value)
    if isinstance(value, list):
        return [_map_texts(function, item) for item in value]
    return {k: _map_texts(function, item) for k, item in value.items()} if isinstance(value, dict) else value


def _problem(entry: Entry, reason: str) -> Problem:
    reason = reason.rstrip(".").removeprefix("KeyError raised while resolving interpolation: ").strip('"')
    remedy = f"Set it, or give a default: ${{{_RESOLVER}:NAME,default}}." if reason.startswith(_UNSET) else LITERALLY
    return entry.problem(f"{entry.value!r}: {reason}. {remedy}")
