"""What ALFWorld's wheel has: the domain, the grammar of its texts, its goals, and what belongs where.

The package itself is never imported, since that makes a folder in the home directory.
"""

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType


def domain() -> str:
    """The domain in PDDL."""
    return _text("alfred.pddl")


def grammar(task: str) -> str:
    """The commands and texts of a game.

    Args:
        task: what the policy is told to do.
    """
    return _text("alfred.twl2").replace("UNKNOWN GOAL", task)


@cache
def goals() -> dict[str, dict[str, str | list[str]]]:
    """Kind of goal -> its `pddl` and `templates`, with `{obj}`, `{recep}` and `{toggle}` for types of things."""
    return dict(_module("goal_library").gdict)


@cache
def contents() -> dict[str, set[str]]:
    """Type of receptacle -> types of objects that it can hold."""
    return dict(_module("constants").VAL_RECEPTACLE_OBJECTS)


@cache
def changes() -> dict[str, set[str]]:
    """`Heatable`, `Coolable`, `Cleanable`, `Toggleable` -> types of objects."""
    return dict(_module("constants").VAL_ACTION_OBJECTS)


@cache
def openable() -> set[str]:
    """Types of receptacles that are closed at first."""
    return set(_module("constants").OPENABLE_CLASS_SET)


def _package() -> Path:
    """Raises ModuleNotFoundError: the package is not installed."""
    spec = importlib.util.find_spec("alfworld")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("No module named 'alfworld'", name="alfworld")
    return Path(spec.origin).parent


@cache
def _text(name: str) -> str:
    return (_package() / "data" / name).read_text()


def _module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"_alfworld_{name}", _package() / "gen" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
