"""Stands in for torchvision, which only vision models use but SGLang's model configs import.

The wheel on PyPI is linked against CUDA: with a CPU build of torch it fails to load, and with it transformers, so it
is not installed there. The mock lives in engine processes alone. transformers takes it for the real one,
which is wanted: SGLang registers image processors that transformers refuses to accept without torchvision.
"""

import enum
import sys
import types

from slimrl.engines.plugin.cpu.mock import enter, unavailable

_MODULES = (
    "torchvision",
    "torchvision.io",
    "torchvision.ops",
    "torchvision.transforms",
    "torchvision.transforms.functional",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
)


class InterpolationMode(enum.Enum):
    """Stand-in for torchvision's enumeration, which image processors read at import; the values are torchvision's."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class _Mock(types.ModuleType):
    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return unavailable(f"{self.__name__}.{name}")


def install() -> bool:
    """Enter the mock; False, and nothing done, where torchvision is imported."""
    if "torchvision" in sys.modules:
        return False
    for name in _MODULES:
        enter(_Mock(name))
    sys.modules["torchvision"].__dict__["__version__"] = "0.0.0"
    for name in _MODULES:
        if ".transforms" in name:
            sys.modules[name].__dict__["InterpolationMode"] = InterpolationMode
    return True
