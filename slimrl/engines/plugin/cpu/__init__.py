"""Lets the SGLang server start without a GPU: stand-ins for three packages, and three settings.

SGLang imports triton, torchvision and sgl_kernel at module level, on every device. `install` puts mock modules
in their places, in this process only, before `import sglang`. It depends on the device, not on what is installed:
PyPI's torch brings triton along, whose kernels cannot run without a GPU. With a GPU it does nothing.
"""

import os
from typing import Any

from slimrl.engines.plugin.cpu import sgl_kernel_stub, torchvision_stub, triton_stub

_NO_LIBRARY = "/nonexistent/libnccl.so"


def install() -> list[str]:
    """Install the stand-ins; returns the names of the packages that were replaced, none where there is a GPU."""
    import torch

    if torch.cuda.is_available():
        return []
    # torch's compiler uses triton, and would find the mock.
    os.environ["TORCH_COMPILE_DISABLE"] = "1"
    # The decorators of compiled functions do not even import it, which takes one tenth of an engine's start.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    # A CUDA build of torch brings NCCL along, which SGLang then starts for every tensor-parallel group.
    os.environ["SGLANG_NCCL_SO_PATH"] = _NO_LIBRARY
    _default_to_the_cpu()
    stubs = {"sgl_kernel": sgl_kernel_stub, "torchvision": torchvision_stub, "triton": triton_stub}
    return [name for name, stub in stubs.items() if stub.install()]


def _default_to_the_cpu() -> None:
    """`torch.get_device_module()` of a CUDA build is torch.cuda, on every machine; SGLang calls what it finds there."""
    import torch

    module: Any = torch
    of_device = torch.get_device_module
    module.get_device_module = lambda device=None: torch.cpu if device is None else of_device(device)
