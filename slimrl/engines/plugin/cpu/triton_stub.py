"""Stands in for triton, which compiles for GPUs only.

About a hundred kernel files of SGLang import triton at module level and decorate kernels with it. On a CPU none
of those kernels runs, so every name below `triton` may be a mock that accepts being imported, subclassed, and
used as a decorator.
"""

import importlib.machinery
import sys
import types
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from typing import Any

from slimrl.engines.plugin.cpu.mock import enter

_CLASSES = {
    "triton.language": ("constexpr", "dtype"),
    "triton.runtime.jit": ("JITFunction",),
    "triton.runtime.autotuner": ("OutOfResources", "PTXASError"),
}
"""Names that torch, transformers or SGLang subclass, raise, or test instances against, and that must be classes."""


class _Base:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.value = args[0] if args else None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__()


class _Mock(types.ModuleType):
    """A module all of whose names exist: capitalised ones are classes, the others mocks again."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper() or name in _CLASSES.get(self.__name__, ()):
            base = (Exception,) if name.endswith("Error") or name == "OutOfResources" else (_Base,)
            value: Any = type(name, base, {"__module__": self.__name__})
            setattr(self, name, value)
            return value
        child = _Mock(f"{self.__name__}.{name}")
        enter(child)
        return child

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Act as a decorator: as `@jit` return the function, as `@jit(...)` a decorator that does."""
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]
        return lambda function: function

    def __bool__(self) -> bool:
        return False


class _Finder(MetaPathFinder, Loader):
    """Finder that answers `import triton.anything.below`."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith("triton."):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return sys.modules.get(spec.name) or _Mock(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        enter(module)


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def install() -> bool:
    """Enter the mock; False, and nothing done, where triton is imported."""
    if "triton" in sys.modules:
        return False
    triton = _Mock("triton")
    triton.__dict__.update(__version__="3.0.0", cdiv=_cdiv, next_power_of_2=_next_power_of_2)
    enter(triton)
    sys.meta_path.insert(0, _Finder())
    for name in ("triton.runtime.cache", "triton.compiler.compiler"):
        # torch hashes this key into its compile cache.
        module = _Mock(name)
        module.__dict__["triton_key"] = lambda: "no triton"
        if (parent := name.rpartition(".")[0]) not in sys.modules:
            enter(_Mock(parent))
        enter(module)
    return True
