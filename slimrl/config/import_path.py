"""Resolves import paths of a recipe, `module:function`, and finds what their parameters ask for."""

import importlib
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slimrl.config.modules import hidden_file, hidden_text, near_module
from slimrl.config.problems import suggestion, syntax_text


def parameters_of_type(target: Callable[..., Any], kind: type) -> list[str]:
    """Names of the parameters of a function, or of a class, that are annotated with a type."""
    try:
        parameters = inspect.signature(target).parameters
    except ValueError:
        return []  # some functions written in C have no signature
    return [name for name, each in parameters.items() if each.annotation in (kind, kind.__name__)]


def resolve(path: str, *, classes: bool = False, arguments: Sequence[str] = ()) -> Callable[..., Any]:
    """The function or other callable at `module:function`; a class only if `classes`.

    Args:
        arguments: names of the arguments with which it will be called, by place; empty to leave its signature alone.

    Raises:
        ValueError: the path is not of this form, there is no such module or function, it takes other arguments, or
            the module's source is not Python.
            Other errors of the module itself are raised unchanged.
    """
    module_name, separator, name = path.partition(":")
    if not separator or not module_name or not name:
        raise ValueError(f"{path!r} is not an import path; write module:function")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(error.name + ".")):
            raise
        meant = near_module(module_name)
        raise ValueError(f"{path}: no module {error.name}{'.' if meant else ''}{meant}") from error
    except SyntaxError as error:
        raise ValueError(f"{path}: {syntax_text(error)}") from error
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            if own := hidden_file(module_name, Path(getattr(module, "__file__", ""))):
                raise ValueError(f"{path}: {hidden_text(own)}")
            public = [one for one in dir(value) if not one.startswith("_") and callable(getattr(value, one))]
            raise ValueError(f"{path}: {module_name} has no {name}.{suggestion(part, public)}")
        value = getattr(value, part)
    if not callable(value):
        raise ValueError(f"{path}: {name} is not a function but {type(value).__name__}")
    if isinstance(value, type) and not classes:
        raise ValueError(f"{path}: {name} is a class, not a function")
    if arguments:
        try:
            inspect.signature(value).bind(*arguments)
        except TypeError as error:
            raise ValueError(f"{path}: cannot be called as {name}({', '.join(arguments)}): {error}") from error
    return value
