"""What the stand-ins share: whether a package is missing, and entering a module into sys.modules."""

import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn


def is_missing(name: str) -> bool:
    """True where neither the real package nor a stand-in of it can be imported."""
    return name not in sys.modules and importlib.util.find_spec(name) is None


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
