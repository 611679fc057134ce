"""Kernels of an engine that leave weights as they are loaded, so that a resync finds them."""

from collections.abc import Iterator, Mapping
from typing import Any

from slimrl.config.problems import Violation

PACKING_KERNELS = ("moe_runner_backend", "fp8_gemm_runner_backend")
"""Fields for which SGLang chooses kernels on a GPU of compute capability 10 or newer that reorder the rows of experts,
or store FP8 with other scales. Only triton leaves weights there as they are loaded."""


def graph_violations(given: Mapping[str, Any]) -> Iterator[Violation]:
    """CUDA graphs of a colocated engine that SGLang cannot release, and so refuses at the engine's start."""
    why = "SGLang's breakable CUDA graphs cannot release their memory, as a colocated engine must."
    for name in ("cuda_graph_backend_prefill", "cuda_graph_backend_decode"):
        if given.get(name) == "breakable":
            yield f"rollout.sglang.{name}", f"breakable: {why} Use full or disabled, or leave it out."
    prefill_is_chosen = given.get("cuda_graph_backend_prefill") is not None or given.get("disable_cuda_graph")
    if given.get("disable_prefill_cuda_graph") is False and not prefill_is_chosen:
        yield (
            "rollout.sglang.disable_prefill_cuda_graph",
            f"false: {why} Leave it out, or set cuda_graph_backend_prefill full.",
        )
    if given.get("cuda_graph_config") is not None:
        yield (
            "rollout.sglang.cuda_graph_config",
            "could choose graphs that a colocated engine cannot release. Use cuda_graph_backend_prefill and the other "
            "fields of their own.",
        )


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
