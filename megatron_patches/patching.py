"""Changing megatron-core in place: recompile a function from its edited source, replace attributes.

A replacement states how often its text must occur, so that a megatron-core version with a changed line fails at start
instead of running unpatched.
"""

import functools
import importlib
import inspect
import sys
import textwrap
from operator import attrgetter
from types import FunctionType, ModuleType
from typing import Any

APPLIED_DECORATORS = {"@torch.no_grad()", "@_disable_gc()"}
KEPT_DECORATORS = {"@staticmethod", "@classmethod", *APPLIED_DECORATORS}
"""Decorators that `patch_source` restores; another one is an error, because it would be lost."""


def patch_source(module_name: str, qualname: str, *changes: tuple[str, str, int]) -> None:
    """Recompile `module.qualname` with text replaced in its source.

    Args:
        module_name: module that defines the function.
        qualname: `function` or `Class.method`.
        changes: (old text, new text, number of times the old text must occur).

    Raises:
        RuntimeError: an old text occurs more or less often, or a decorator would be lost.
    """
    module = importlib.import_module(module_name)
    *path, name = qualname.split(".")
    owner: Any = functools.reduce(getattr, path, module)
    raw = owner.__dict__[name]
    kind = type(raw) if isinstance(raw, staticmethod | classmethod) else None
    function = inspect.unwrap(raw.__func__ if kind else raw)
    source = textwrap.dedent(inspect.getsource(function))
    for old, new, count in changes:
        found = source.count(old)
        if found != count:
            raise RuntimeError(f"{module_name}.{qualname}: {old!r} occurs {found} times, {count} expected")
        source = source.replace(old, new)
    lines = source.splitlines()
    first = next(i for i, line in enumerate(lines) if line.lstrip().startswith("def "))
    decorators = {line.strip() for line in lines[:first] if line.startswith("@")}
    if decorators - KEPT_DECORATORS:
        raise RuntimeError(f"{module_name}.{qualname}: decorators {sorted(decorators - KEPT_DECORATORS)} would be lost")
    compiled = _compile("\n".join(lines[first:]), module, owner, function)
    for decorator in decorators & APPLIED_DECORATORS:
        compiled = attrgetter(decorator[1:-2])(module)()(compiled)
    patch_attr(owner, name, kind(compiled) if kind else compiled)


def patch_attr(owner: Any, name: str, new: Any) -> None:
    """Set `owner.name` and every copy of it that `from module import name` made inside megatron.core."""
    old = owner.__dict__[name]
    setattr(owner, name, new)
    if isinstance(owner, type):
        return
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("megatron.core"):
            for key, value in list(vars(module).items()):
                if value is old:
                    setattr(module, key, new)


def _compile(source: str, module: ModuleType, owner: Any, function: FunctionType) -> Any:
    """The function that `source` defines, with its module's globals and the `__class__` cell for `super()`."""
    scope: dict[str, Any] = {}
    made = f"def make(__class__):\n{textwrap.indent(source, '    ')}\n    return {function.__name__}\n"
    exec(compile(made, f"<patched {module.__name__}.{function.__qualname__}>", "exec"), module.__dict__, scope)
    compiled = scope["make"](owner)
    compiled.__module__, compiled.__qualname__ = function.__module__, function.__qualname__
    return compiled
