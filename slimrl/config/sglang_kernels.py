"""Kernels of an engine that leave weights as they are loaded, so that a resync finds them."""

from collections.abc import Mapping
from typing import Any

PACKING_KERNELS = ("moe_runner_backend", "fp8_gemm_runner_backend")
"""Fields for which SGLang chooses kernels on a GPU of compute capability 10 or newer that reorder the rows of experts,
or store FP8 with other scales. Only triton leaves weights there as they are loaded."""


def plain_kernels(given: Mapping[str, Any]) -> dict[str, str]:
    """The kernels for a GPU of compute capability 10 or newer, which leave weights as they are loaded.

    Raises:
        ValueError: the recipe asks for others.
    """
    for name in PACKING_KERNELS:
        if (value := given.get(name)) not in (None, "triton"):
            raise ValueError(
                f"rollout.sglang.{name}: {value} stores weights on this GPU in a layout in which a resync cannot place "
                "them. Use triton, or leave it out."
            )
    return dict.fromkeys(PACKING_KERNELS, "triton")
