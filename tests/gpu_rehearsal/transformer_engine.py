"""Transformer Engine's own Python over a stand-in for its compiled part: modules can be built, and choose kernels.

The wheel `transformer_engine` is Python alone; `make setup` unpacks it beside the packages of .venv, where nothing
imports it by chance.
"""

import enum
import os
import sys
import types
from pathlib import Path
from typing import Any

FOLDER = Path(sys.prefix) / "transformer_engine"
"""Where the wheel is unpacked"""

ENUMERATIONS = {
    "DType": ("kByte", "kInt32", "kFloat32", "kFloat16", "kBFloat16", "kFloat8E4M3", "kFloat8E5M2", "kFloat4E2M1"),
    "NVTE_Fused_Attn_Backend": ("NVTE_No_Backend", "NVTE_F16_arbitrary_seqlen", "NVTE_FP8"),
    "FP8FwdTensors": [f"GEMM{i}_{what}" for i in (1, 2, 3) for what in ("INPUT", "WEIGHT", "OUTPUT")],
    "FP8BwdTensors": [f"GRAD_{what}{i}" for i in (1, 2, 3) for what in ("OUTPUT", "INPUT")],
}
"""Those whose members Python counts"""


class _Names(type):
    """Metaclass that gives each attribute of a class a number of its own."""

    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, len(vars(cls)))
        return getattr(cls, name)


class _Compiled(types.ModuleType):
    """In place of transformer_engine_torch: classes of constants, and functions that do nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ENUMERATIONS:
            value: Any = enum.IntEnum(name, ENUMERATIONS[name], start=0)
        elif name[0].isupper():
            value = _Names(name, (), {})
        else:
            value = lambda *args, **kwargs: None  # noqa: E731
        setattr(self, name, value)
        return value


def install() -> None:
    """Make `import transformer_engine.pytorch` work in this process."""
    if not FOLDER.is_dir():
        raise FileNotFoundError(f"{FOLDER}: `make setup` fetches Transformer Engine's Python into it")
    sys.path.insert(0, str(FOLDER))
    # While it is being built, it loads no libraries and asks for no other packages.
    os.environ["NVTE_PROJECT_BUILDING"] = "1"
    # The second exports models, and needs packages of its own.
    for name in ("transformer_engine_torch", "transformer_engine.pytorch.onnx_extensions"):
        sys.modules[name] = _Compiled(name)
    import transformer_engine.common

    transformer_engine.common.load_framework_extension = lambda framework: None
    import transformer_engine.pytorch
