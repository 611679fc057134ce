"""Resolves import paths of a recipe, `module:function`, and finds what their parameters ask for."""

import importlib
import inspect
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slimrl.config.problems import closest, suggestion, syntax_text


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


def near_module(module: str) -> str:
    """` Did you mean X?`, where a module of the user has nearly that path, or nearly its last name; else empty."""
    modules: dict[str, str] = {}
    for folder in _own_folders():
        for file in (*folder.glob("*.py"), *folder.glob("*/*.py")):
            name = ".".join(file.relative_to(folder).with_suffix("").parts)
            if all(part.isidentifier() and part != "__init__" for part in name.split(".")):
                modules.setdefault(name, name.rpartition(".")[2])
    last = module.rpartition(".")[2]
    if last not in modules.values():
        if (meant := closest(module, modules, cutoff=0.75)) is not None:
            return f" Did you mean {meant}?"
        last = closest(last, modules.values(), cutoff=0.85) or last
    meant = next((name for name in modules if modules[name] == last), None)
    return "" if meant is None else f" Did you mean {meant}?"


def hidden_file(module: str, found: Path | None) -> Path | None:
    """The user's file with the name of one of Python's own modules, if another file of that name is imported.

    Args:
        found: the file that is imported; None if there is none.
    """
    if module not in sys.stdlib_module_names or found is None:
        return None
    files = [folder / f"{module}.py" for folder in _own_folders()]
    return next((file for file in files if file.is_file() and file.resolve() != found.resolve()), None)


def hidden_text(file: Path) -> str:
    return f"{file.stem} is Python's own module, which is found instead of {file}. Rename the file."


def _own_folders() -> list[Path]:
    """Folders of `sys.path` that hold neither Python's own modules nor installed packages, the current one as `.`."""
    here, library = Path.cwd(), Path(sysconfig.get_path("stdlib")).resolve()
    folders = [folder for folder in dict.fromkeys(Path(path).resolve() for path in sys.path) if folder.is_dir()]
    own = [
        folder
        for folder in folders
        if library not in (folder, *folder.parents) and folder.name not in ("site-packages", "dist-packages")
    ]
    return [Path() if folder == here else folder for folder in own]
