"""Reading a recipe: YAML, inheritance, command-line overrides, and where every value came from.

1. Read the file and, depth first, the files that it `extends`; a later value replaces an earlier one.
2. Lay the overrides `a.b.c=value` over them.
3. Refuse unknown keys, resolve `${...}`, convert each value to the type of its field, look for missing values. A
   passthrough value of a wrong type is left out, so that later rules only see values of the right type.
4. Raise one RecipeError that lists every problem, or return the recipe and its provenance.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, Literal, cast, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from slimrl.config.algorithms import SETTINGS
from slimrl.config.aliases import no_setting
from slimrl.config.hints import keys_there, meant_key
from slimrl.config.interpolation import FromEnvironment, is_interpolated, resolve_entries, without_openings
from slimrl.config.keys import (
    EXTENDS,
    FREE_SECTIONS,
    KEY_TYPES,
    PASSTHROUGH,
    TEXTS,
    chosen_sections,
    default_config,
    flatten,
    is_known,
    is_section,
    keys_with_choice,
    named_type,
    nest,
    schema_key,
)
from slimrl.config.passthrough import field_problem, passthrough_fields
from slimrl.config.problems import Problem, RecipeError, suggestion
from slimrl.config.schema.algorithm import AlgorithmName
from slimrl.config.schema.recipe import Recipe
from slimrl.config.sources import read_file, read_overrides
from slimrl.config.yaml_source import Entry, display_path

Command = Literal[
    "train", "train --trajectories", "sft", "eval", "rollout", "export", "resync estimate", "resync bench"
]

SERVING = ("train", "eval", "rollout", "resync bench")
"""Commands that start engines."""

DEFAULT = "default"

NOT_NEEDED: dict[str, tuple[str, ...]] = {
    "train": ("sft",),
    "train --trajectories": ("sft", "data", "eval", "teacher"),
    "sft": ("algorithm", "critic", "rollout", "reward", "teacher"),
    "eval": (
        "steps",
        "algorithm",
        "critic",
        "stop",
        "trainer",
        "sft",
        "data.train",
        "data.more",
        "data.weights",
        "teacher",
    ),
    "rollout": ("steps", "algorithm", "critic", "stop", "trainer", "sft", "data.eval"),
    "export": ("algorithm", "critic", "stop", "rollout", "agent", "reward", "resync", "data", "eval", "sft", "teacher"),
    "resync estimate": ("steps", "algorithm", "critic", "stop", "agent", "reward", "data", "eval", "sft", "teacher"),
    "resync bench": ("steps", "algorithm", "critic", "stop", "agent", "reward", "data", "eval", "sft", "teacher"),
}
"""Sections and keys that a command does not read. Mandatory values may be missing there, and are then "???"."""


@dataclass(frozen=True, kw_only=True)
class LoadedRecipe:
    """A recipe whose keys and types are right, and the origin of each of its values."""

    recipe: Recipe
    provenance: dict[str, str]
    """Dotted key -> `file:line`, `command line` or `default`; every key of the recipe has one."""
    path: str
    """Path of the recipe's file as shown to the user."""
    command: Command
    environment: FromEnvironment = field(default_factory=FromEnvironment)

    def where(self, key: str) -> str:
        """The place where the key was set; for a key that the critic takes over from the trainer, where the trainer's
        was; for a default, the recipe's path."""
        origin = self.provenance.get(key) or self.provenance.get(key.removeprefix("critic."), self.path)
        return f"{self.path} ({DEFAULT})" if origin == DEFAULT else origin

    def problem(self, key: str, message: str, *, warning: bool = False) -> Problem:
        """A problem with a key of this recipe, values from the environment hidden."""
        return Problem(key=key, message=self.environment.hide(message), where=self.where(key), warning=warning)


def load_recipe(path: Path | str, overrides: Sequence[str] = (), command: Command = "train") -> LoadedRecipe:
    """Read a recipe and check it against the schema; no other files are read.

    Args:
        overrides: `a.b.c=value` each, the value in YAML; later ones win.
        command: its mandatory keys must be given.

    Raises:
        RecipeError: unknown keys, wrong types, missing values, broken YAML, all of them at once.
    """
    loaded, problems = read_recipe(path, overrides, command)
    if loaded is None or problems:
        raise RecipeError(problems)
    return loaded


def read_recipe(
    path: Path | str, overrides: Sequence[str] = (), command: Command = "train"
) -> tuple[LoadedRecipe | None, list[Problem]]:
    """Read a recipe as load_recipe does, for a caller with more to check: returns problems instead of raising an
    exception.

    Returns:
        The recipe, None if a key of the schema is unknown, missing or of a wrong type; and every problem.
    """
    path = Path(path)
    problems: list[Problem] = []
    entries = [*read_file(path, (), "", problems), *read_overrides(overrides, problems)]
    known = {entry.key: entry for entry in entries if _check_key(entry, problems)}
    readable = all(p.key not in ("", EXTENDS) and (is_known(p.key) or meant_key(p.key) != EXTENDS) for p in problems)
    _drop_nulls(known, entries, problems)
    values, environment = resolve_entries(known, problems)
    values = {**_algorithm_settings(known, values), **values}
    for key in _check_passthrough(known, values, problems):
        del values[key]
    config = default_config()
    for section in chosen_sections(values):
        OmegaConf.update(config, section, KEY_TYPES[schema_key(section)], force_add=True)
    for key, value in values.items():
        _assign(config, known[key], value, environment, problems)
    problems[:] = [replace(problem, message=environment.hide(problem.message)) for problem in problems]
    shown = display_path(path)
    if readable:
        refused = {problem.key for problem in problems}
        problems += [
            Problem(where=shown, key=key, message=f"missing; `slimrl {command}` needs a value.")
            for key in OmegaConf.missing_keys(config) - refused
            if is_needed(key, command) and not key.startswith("critic.")
        ]
    problems.sort(key=_place)
    if not readable or any(is_known(p.key) and p.key.rpartition(".")[0] not in PASSTHROUGH for p in problems):
        return None, problems
    literal = ((key, value) for key, value in values.items() if is_interpolated(value))
    container = cast(dict[str, Any], OmegaConf.to_container(config))
    container = nest(literal, container)
    _share_with_critic(container, values)
    recipe = _build(Recipe, container)
    provenance = {key: known[key].where if key in values else DEFAULT for key, _ in flatten(recipe, values)}
    loaded = LoadedRecipe(recipe=recipe, provenance=provenance, path=shown, command=command, environment=environment)
    return loaded, problems


def intended_command(path: Path | str, overrides: Sequence[str] = ()) -> Command:
    """`sft` for a recipe that gives `sft.max_tokens`, which only that command needs, else `train`."""
    ignored: list[Problem] = []
    entries = [*read_file(Path(path), (), "", ignored), *read_overrides(overrides, ignored)]
    return "sft" if any(entry.key == "sft.max_tokens" for entry in entries) else "train"


def _place(problem: Problem) -> tuple[str, int, str]:
    """Sorts by file, then line, then key."""
    file, _, line = problem.where.rpartition(":")
    return (file, int(line), problem.key) if line.isdigit() else (problem.where, 0, problem.key)


def trains(command: str) -> bool:
    """Whether a command builds the trainer."""
    return is_needed("trainer", command)


def is_needed(key: str, command: str) -> bool:
    """Whether a command reads this setting."""
    return not any(key == parent or key.startswith(parent + ".") for parent in NOT_NEEDED[command])


def _check_key(entry: Entry, problems: list[Problem]) -> bool:
    """Whether the schema has the key; a section given a plain value is a problem too."""
    if not is_known(entry.key):
        section, _, name = entry.key.rpartition(".")
        chosen = keys_with_choice(section, name)
        meant = f"{chosen[0]}: {name}" if chosen else meant_key(entry.key)
        if said := no_setting(entry.key):
            hint = f" {said}"
        else:
            hint = f" Did you mean {meant}?" if meant else keys_there(entry.key)
        problems.append(entry.problem(f"no such key.{hint}"))
        return False
    if is_section(entry.key) and entry.value != {}:
        problems.append(entry.problem(f"is a section; expected keys below it, got {entry.value!r}."))
        return False
    return not is_section(entry.key)


def _algorithm_settings(known: dict[str, Entry], values: dict[str, Any]) -> dict[str, Any]:
    """Settings that the algorithm's name stands for, which are added to `known`; the recipe's own replace them."""
    key = "algorithm.name"
    name = values.get(key)
    if not isinstance(name, str) or name not in AlgorithmName.__members__:
        return {}
    found = {f"algorithm.{setting}": value for setting, value in SETTINGS[AlgorithmName(name)].items()}
    given = {setting: value for setting, value in found.items() if setting not in known}
    where = f"{known[key].where} (algorithm {name})"
    known |= {setting: Entry(key=setting, value=value, where=where) for setting, value in given.items()}
    return given


def _share_with_critic(container: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Give the critic the trainer's settings that a recipe does not give it itself."""
    for key in values:
        if not key.startswith("trainer.") or f"critic.{key}" in values:
            continue
        *parents, name = key.split(".")
        ours, critics = container, container["critic"]
        for parent in parents:
            ours, critics = ours[parent], critics[parent]
        critics[name] = ours[name]


def _drop_nulls(known: dict[str, Entry], entries: Sequence[Entry], problems: list[Problem]) -> None:
    """Remove entries of the sections of `data` whose last value is null; each must have been given before that."""
    given = {entry.key: entry for entry in entries if _is_named(entry.key) and entry.value is not None}
    for key in [key for key, entry in known.items() if _is_named(key) and entry.value is None]:
        dropped = known.pop(key)
        if key not in given:
            what = "set" if key.startswith("data.eval.") else "entry"
            reason = f"null leaves out an inherited {what}, and none has this name."
            problems.append(dropped.problem(reason + suggestion(key, given)))


def _is_named(key: str) -> bool:
    """Whether a recipe chose the last part of the key, in a section of `data`."""
    section = key.rpartition(".")[0]
    return section in FREE_SECTIONS and section.startswith("data.")


def _check_passthrough(known: dict[str, Entry], values: dict[str, Any], problems: list[Problem]) -> list[str]:
    """Keys of passthrough values that the installed packages refuse; each becomes a problem."""
    refused: list[str] = []
    for section in PASSTHROUGH:
        keys = [key for key in values if key.startswith(section + ".")]
        if not keys:
            continue
        try:
            fields = passthrough_fields(section)
        except ValueError as error:
            problems.append(Problem(where=known[keys[0]].where, key=section, message=f"{error}."))
            refused += keys
            continue
        for key in keys:
            if message := field_problem(section, key.removeprefix(section + "."), values[key], fields):
                problems.append(known[key].problem(message))
                refused.append(key)
    return refused


def _assign(config: Any, entry: Entry, value: Any, environment: FromEnvironment, problems: list[Problem]) -> None:
    """Set a value in the structured config, which converts it to its field's type."""
    annotation, reason = _annotation(entry.key), ""
    fits = is_interpolated(entry.value) or not _is_other_scalar(annotation, value)
    try:
        if fits:
            OmegaConf.update(
                config, entry.key, _by_name(annotation, without_openings(value)), merge=False, force_add=True
            )
    except (OmegaConfBaseException, ValueError) as error:
        fits, reason = False, str(error).splitlines()[0]
    if not fits:
        reference = environment.references.get(entry.key)
        message = _type_message(entry.key, annotation, value if reference is None else reference, reason)
        message += "" if reference is None else " The value from the environment is not shown."
        problems.append(entry.problem(message))


def _by_name(annotation: Any, value: Any) -> Any:
    """The name of a choice, which OmegaConf takes; `async` cannot be the name of its member in Python.

    Raises:
        ValueError: not one of the choices.
    """
    if isinstance(annotation, type) and issubclass(annotation, Enum) and isinstance(value, str):
        return annotation(value).name
    return value


def _annotation(key: str) -> Any:
    """Type of a key's value; None in a free section of any values."""
    key = schema_key(key)
    return str if key.rpartition(".")[0] in TEXTS else KEY_TYPES.get(key)


def _is_other_scalar(annotation: Any, value: Any) -> bool:
    """Whether a recipe gives a word for a number or a boolean, or a boolean for a number or a word.

    OmegaConf would take `yes` for true, "1_000" for 1000, true for 1 and true for "True". It may convert the result of
    `${...}`, because environment variables are text.
    """
    numbers = annotation in (int, float, int | None, float | None)
    return (isinstance(value, str) and (numbers or annotation is bool)) or (
        isinstance(value, bool) and (numbers or annotation is str)
    )


def _type_message(key: str, annotation: Any, value: Any, reason: str) -> str:
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        choices = [member.value for member in annotation]
        others = keys_with_choice(key.rpartition(".")[0], value)
        meant = f" Did you mean {others[0]}: {value}?" if others else suggestion(str(value), choices)
        return f"{'null' if value is None else repr(value)} is not one of {', '.join(choices)}." + meant
    if annotation is None:
        return f"{reason.rstrip('.')}."
    name = annotation.__name__ if type(annotation) is type else str(annotation)
    wanted = "true or false" if annotation is bool else name
    how = f" Write [{value}]." if name.startswith("list[") and isinstance(value, str) and value else ""
    return f"expected {wanted}, got {'null' if value is None else repr(value)}.{how}"


def _build(cls: type, values: dict[str, Any]) -> Any:
    """A dataclass from a plain container; unlike OmegaConf.to_object it accepts missing values."""
    hints = get_type_hints(cls)
    return cls(**{name: _value(hints[name], value) for name, value in values.items()})


def _value(annotation: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(annotation):
        return _build(cast(type, annotation), value)
    if (inner := named_type(annotation)) is not None:
        return {name: _build(inner, one) for name, one in value.items()}
    return value
