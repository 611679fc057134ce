"""What a class must have to be an environment. Needs the standard library alone, as other interpreters check it too."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

METHODS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "start": (("prompt",), ("seed", "scratch")),
    "step": (("turn",), ()),
    "close": ((), ()),
    "copy": ((), ("scratch",)),
}
"""Arguments of each method of an environment, by place and by name."""
OPTIONAL = ("copy",)
"""Methods that an environment need not have"""


def check_class(
    path: str,
    make: Callable[..., Any],
    arguments: Mapping[str, Any],
    *,
    supplied: Iterable[str] = (),
    asynchronous: bool,
) -> None:
    """
    Args:
        path: import path of the class, for messages.
        arguments: those of the recipe.
        supplied: names of those that it gets besides.
        asynchronous: the methods must be `async def`; otherwise they may be plain ones.

    Raises:
        ValueError: it lacks a method, or does not take the arguments.
    """
    if isinstance(make, type):
        for name, (places, names) in METHODS.items():
            if name in OPTIONAL and not hasattr(make, name):
                continue
            _check_method(path, make, name, places, names, asynchronous=asynchronous)
    check_made(path, make, arguments, supplied)


def check_made(path: str, make: Callable[..., Any], arguments: Mapping[str, Any], supplied: Iterable[str]) -> None:
    """Raises ValueError: a class does not take the recipe's arguments and those that it gets besides."""
    try:
        inspect.signature(make).bind(**dict.fromkeys(supplied), **arguments)
    except TypeError as error:
        said = ", ".join(arguments) or "no arguments"
        raise ValueError(f"{path}: cannot be made with {said}: {error}") from error


def check_roles(path: str, make: Any, named: Iterable[str]) -> tuple[str, ...]:
    """The roles that the class says it has, in `ROLES`; none if it does not say.

    Raises:
        ValueError: one that the recipe names is none of them.
    """
    known = tuple(getattr(make, "ROLES", ()))
    if known and (unknown := sorted(set(named) - set(known))):
        raise ValueError(f"{path}: has no role {', '.join(unknown)}; it has {', '.join(known)}")
    return known


def check_arguments(path: str, make: Any, arguments: Mapping[str, Any]) -> None:
    """Let the class's own `check`, if it has one, look at the recipe's arguments; raises ValueError."""
    check = getattr(make, "check", None)
    if check is None:
        return
    try:
        check(**arguments)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _check_method(
    path: str, make: type, name: str, places: tuple[str, ...], names: tuple[str, ...], *, asynchronous: bool
) -> None:
    method = getattr(make, name, None)
    if asynchronous and not inspect.iscoroutinefunction(method):
        raise ValueError(
            f"{path}: has no `async def {name}`, which an environment in slimrl's own event loop has. One with plain "
            "methods needs agent.environment_isolation thread, process or venv."
        )
    if not callable(method):
        raise ValueError(f"{path}: has no method {name}, which an environment has")
    # Stands for the instance among the arguments of a method that is looked at through its class.
    own = () if isinstance(inspect.getattr_static(make, name), staticmethod | classmethod) else (make,)
    try:
        inspect.signature(method).bind(*own, *places, **dict.fromkeys(names))
    except TypeError as error:
        said = ", ".join([*places, *(f"{one}=..." for one in names)])
        raise ValueError(f"{path}: cannot be called as {name}({said}): {error}") from error
