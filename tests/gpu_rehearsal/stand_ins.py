"""Packages with compiled code that a machine with GPUs has: importable here, with every name in them, and no more.

Their versions are those that the installed SGLang requires, for SGLang compares them as it starts.
"""

import importlib.metadata
import re
import sys
import types
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

from slimrl.engines.plugin.cpu import torchvision_stub

ENGINE_PACKAGES = {
    "sgl_kernel": "sglang-kernel",
    "flashinfer": "flashinfer_python",
    "flash_attn": "flash-attn-4",
    "deep_gemm": "sgl-deep-gemm",
    "deep_ep": "sgl-deep-ep",
    "torch_memory_saver": "torch_memory_saver",
    "pynvml": "nvidia-ml-py",
}
"""Module -> its distribution among the requirements of SGLang"""


class _StandIn(types.ModuleType):
    """Has every name: a class where it begins with a capital, else a stand-in again."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            made = {"__module__": self.__name__, "__init__": lambda self, *args, **kwargs: None}
            value: Any = type(name, (Exception,) if name.endswith("Error") else (), made)
        else:
            value = _StandIn(f"{self.__name__}.{name}")
            value.__path__ = []
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As a decorator it leaves what it decorates."""
        return args[0] if len(args) == 1 and not kwargs and callable(args[0]) else self

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *args: Any) -> None: ...

    def __mro_entries__(self, bases: Sequence[Any]) -> tuple[type, ...]:
        return ()


class _Finder(MetaPathFinder, Loader):
    """Finds the packages and any module below them."""

    def __init__(self, packages: Sequence[str], fill: Callable[[types.ModuleType], None]) -> None:
        self.packages, self.fill = frozenset(packages), fill

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self.packages else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        self.fill(module)


def stand_in(packages: Sequence[str], fill: Callable[[types.ModuleType], None] = lambda module: None) -> None:
    """Make `import PACKAGE.anything` give stand-ins, whatever is installed.

    Args:
        fill: sets what a module is to have beside, by its name.
    """
    sys.meta_path.insert(0, _Finder(packages, fill))


def required_versions(distribution: str) -> dict[str, str]:
    """Distribution -> the least version that another one's metadata names."""
    pattern = re.compile(r"([\w.-]+)(?:\[[\w,]+\])?\s*(?:[=>]=\s*([\w.]+))?")
    found = {}
    for text in importlib.metadata.requires(distribution) or []:
        if match := pattern.match(text):
            found[normal(match[1])] = match[2] or "99"
    return found


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pretend_installed(versions: dict[str, str]) -> None:
    """Let importlib.metadata give these versions, by normalised name."""
    asked = importlib.metadata.version
    importlib.metadata.version = lambda name: versions.get(normal(name)) or asked(name)


def install_engine_packages() -> None:
    """What SGLang's own requirements bring to a machine with GPUs."""
    required = required_versions("sglang")
    versions = {normal(name): required[normal(name)] for name in ENGINE_PACKAGES.values()}
    of_module = {module: versions[normal(name)] for module, name in ENGINE_PACKAGES.items()}

    def fill(module: types.ModuleType) -> None:
        module.__dict__["__version__"] = of_module[module.__name__.partition(".")[0]]

    stand_in(list(ENGINE_PACKAGES), fill)
    torchvision_stub.install()
    pretend_installed(versions)
