"""Import paths of a recipe, `module:function`, resolved to what they name."""

import importlib
from collections.abc import Callable
from typing import Any

from slimrl.config.problems import suggestion


def resolve(path: str, *, classes: bool = False) -> Callable[..., Any]:
    """The function, or other object that can be called, that `module:function` names.

    Args:
        classes: let classes pass, which are called too; where a function is needed they are a mistake.

    Raises:
        ValueError: it is not written so, the module is not found, or it has no such function. An error inside the
            module itself is raised as it is.
    """
    module_name, separator, name = path.partition(":")
    if not separator or not module_name or not name:
        raise ValueError(f"{path!r} is no import path; write module:function")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(error.name + ".")):
            raise
        raise ValueError(f"{path}: no module {error.name}") from error
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            raise ValueError(f"{path}: {module_name} has no {name}.{suggestion(part, _public(value))}")
        value = getattr(value, part)
    if not callable(value):
        raise ValueError(f"{path}: {name} is no function but {type(value).__name__}")
    if isinstance(value, type) and not classes:
        raise ValueError(f"{path}: {name} is a class; a function is needed, or an object that can be called")
    return value


def _public(value: Any) -> list[str]:
    """Names of the functions that a module or class has."""
    return [name for name in dir(value) if not name.startswith("_") and callable(getattr(value, name))]
