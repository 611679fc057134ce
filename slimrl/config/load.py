"""Reading a recipe: YAML, inheritance, command-line overrides, and where every value came from.

1. Read the file and, depth first, the files that it `extends`; a later value replaces an earlier one.
2. Lay the overrides `a.b.c=value` over them.
3. Refuse unknown keys, resolve `${...}`, have pydantic check types and ranges, look for missing values. A passthrough
   value of a wrong type is left out, so that later rules only see values of the right type.
4. Raise one RecipeError that lists every problem, or return the recipe and its provenance.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, Literal

from slimrl.config.algorithms import SETTINGS
from slimrl.config.elsewhere import value_here
from slimrl.config.hints import unknown_text
from slimrl.config.interpolation import FromEnvironment, resolve_entries
from slimrl.config.keys import (
    EXTENDS,
    PASSTHROUGH,
    flatten,
    is_known,
    is_removable,
    is_section,
    keys_with_choice,
    type_of,
    type_text,
)
from slimrl.config.passthrough import field_problem, passthrough_fields
from slimrl.config.problems import Problem, RecipeError, suggestion
from slimrl.config.schema.algorithm import AlgorithmName
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.types import MISSING
from slimrl.config.yaml_source import Entry, display_path, read_file, read_overrides

Command = Literal[
    "train", "train --trajectories", "sft", "eval", "rollout", "export", "resync estimate", "resync bench"
]

SERVING = ("train", "eval", "rollout", "resync bench")
"""Commands that start engines."""

DEFAULT = "default"

SIZES = ("parallel.", "num_ranks", "updates_per_rollout", "megatron.num_layers_in_")
DIVISORS = (
    *(prefix + name for prefix in ("trainer.", "critic.trainer.") for name in SIZES),
    "rollout.engine_",
    "teacher.engine_",
)
"""Sizes by which rules divide; no rule is asked while one of these is below 1."""

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
        The recipe, None if a value is missing or of a wrong type, or a size by which rules divide is below 1; and every
        problem.
    """
    # Most processes know the settings and read no recipe; pydantic takes as long to import as all else.
    from slimrl.config.validation import validated

    path = Path(path)
    broken: list[Problem] = []
    entries = _without_removed([*read_file(path, (), "", broken), *read_overrides(overrides, broken)], broken)
    unknown: list[Problem] = []
    given = {entry.key: entry for entry in entries if _check_key(entry, broken, unknown)}
    readable = not any(p.key in ("", EXTENDS) or p.message.endswith(f"mean {EXTENDS}?") for p in (*broken, *unknown))
    values, environment = resolve_entries(given, broken)
    values = {**_algorithm_settings(given, values), **values}
    refused = _check_passthrough(given, values, unknown)
    for key in refused:
        del values[key]
    recipe, wrong, out_of_range = validated(values)
    broken += [_wrong_value(given[key], values[key], environment.references.get(key)) for key in wrong]
    ranges = [given[key].problem(reason) for key, reason in out_of_range]
    shown = display_path(path)
    missing = [
        Problem(where=shown, key=key, message=f"missing; `slimrl {command}` needs a value.")
        for key, value in flatten(recipe)
        if readable and value == MISSING and key not in {p.key for p in broken} and is_needed(key, command)
    ]
    # What is missing may have been given by a wrong key, so that comes first.
    problems = [*sorted((*broken, *unknown, *ranges), key=_place), *sorted(missing, key=_place)]
    problems = [replace(p, message=environment.hide(p.message)) for p in problems]
    if broken or missing or not readable or any(key.startswith(DIVISORS) for key in (*dict(out_of_range), *refused)):
        return None, problems
    provenance = {key: given[key].where if key in values else DEFAULT for key, _ in flatten(recipe, values)}
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


def _check_key(entry: Entry, broken: list[Problem], unknown: list[Problem]) -> bool:
    """Whether the schema has the key; a section given a plain value is a problem too."""
    if not is_known(entry.key):
        unknown.append(entry.problem(f"no such key.{unknown_text(entry.key, entry.value)}"))
        return False
    if is_section(entry.key) and entry.value != {}:
        broken.append(entry.problem(f"is a section; expected keys below it, got {entry.value!r}."))
    return not is_section(entry.key)


def _algorithm_settings(known: dict[str, Entry], values: dict[str, Any]) -> dict[str, Any]:
    """Settings that the algorithm's name stands for, which are added to `known`; the recipe's own replace them."""
    key = "algorithm.name"
    name = values.get(key)
    if not isinstance(name, str) or name not in AlgorithmName.__members__:
        return {}
    found = {f"algorithm.{setting}": value for setting, value in SETTINGS[AlgorithmName(name)].items()}
    given = {setting: value for setting, value in found.items() if setting not in known}
    # The value of a reference is a member already, which an f-string would write as AlgorithmName.grpo.
    where = f"{known[key].where} (algorithm {AlgorithmName(name).value})"
    known |= {setting: Entry(key=setting, value=value, where=where) for setting, value in given.items()}
    return given


def _without_removed(entries: Sequence[Entry], problems: list[Problem]) -> list[Entry]:
    """The entries without those that a later null removes: `data.eval.NAME: null`, or `reward.parts.NAME: null`, which
    takes all keys of the part."""
    kept: list[Entry] = []
    for entry in entries:
        if entry.value is not None or not is_removable(entry.key):
            kept.append(entry)
            continue
        left = [one for one in kept if not f"{one.key}.".startswith(f"{entry.key}.")]
        if len(left) == len(kept):
            section, *_ = entry.key.rpartition(".")
            depth = entry.key.count(".") + 1
            names = [".".join(one.key.split(".")[:depth]) for one in kept if one.key.startswith(f"{section}.")]
            what = "set" if section == "data.eval" else "entry"
            reason = f"null leaves out an inherited {what}, and none has this name."
            problems.append(entry.problem(reason + suggestion(entry.key, names)))
        kept = left
    return kept


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


def _wrong_value(entry: Entry, value: Any, reference: Any) -> Problem:
    """
    Args:
        reference: what the recipe writes in place of a value from the environment; None for any other value.
    """
    message = _type_message(entry.key, type_of(entry.key), value if reference is None else reference)
    return entry.problem(message + ("" if reference is None else " The value from the environment is not shown."))


def _type_message(key: str, annotation: Any, value: Any) -> str:
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        choices = [member.value for member in annotation]
        others = keys_with_choice(key.rpartition(".")[0], value)
        meant = f" Did you mean {others[0]}: {value}?" if others else suggestion(str(value), choices)
        if (here := value_here(key, value)) in choices:
            meant = f" Did you mean {here}?"
        return f"{'null' if value is None else repr(value)} is not one of {', '.join(choices)}." + meant
    name = type_text(annotation)
    wanted = "true or false" if annotation is bool else name
    how = f" Write [{value}]." if name.startswith("list[") and isinstance(value, str) and value else ""
    return f"expected {wanted}, got {'null' if value is None else repr(value)}.{how}"
