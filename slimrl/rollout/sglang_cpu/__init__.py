"""Lets the SGLang server start where no GPU is: stand-ins for three packages that have no CPU build.

SGLang imports triton, torchvision and sgl_kernel at module level, on every device. `install` puts mock modules
in their places, in this process only, before `import sglang`. Where a real package is installed its stand-in
does nothing, so a GPU process is left as it is.
Without triton torch's compiler is turned off as well: it looks for triton, and finds the mock.
"""

import os

from slimrl.rollout.sglang_cpu import sgl_kernel_stub, torchvision_stub, triton_stub


def install() -> list[str]:
    """Install what is missing; returns the names of the packages that were replaced."""
    stubs = {"sgl_kernel": sgl_kernel_stub, "torchvision": torchvision_stub, "triton": triton_stub}
    replaced = [name for name, stub in stubs.items() if stub.install()]
    if "triton" in replaced:
        os.environ["TORCH_COMPILE_DISABLE"] = "1"
    return replaced
