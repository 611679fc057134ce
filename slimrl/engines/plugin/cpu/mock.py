"""Helpers of the stand-ins: enter a module into sys.modules, and make functions that refuse to be called."""

import importlib.machinery
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn


def enter(module: types.ModuleType) -> None:
    """Make `import module.__name__` find this module, also as an attribute of its parent."""
    name = module.__name__
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    sys.modules[name] = module
    parent, _, leaf = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], leaf, module)


def unavailable(name: str) -> Callable[..., NoReturn]:
    """A function that can be imported but refuses to be called."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{name} does not exist without a GPU")

    refuse.__name__ = name.rpartition(".")[2]
    return refuse
