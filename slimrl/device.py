"""The one place that answers what hardware this process computes on, and what follows from it."""

import importlib.metadata
import importlib.util
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from slimrl.config.schema.precision import Fp8Scaling

_PCI_DEVICES = Path("/sys/bus/pci/devices")

log = logging.getLogger(__name__)


def device_type() -> str:
    """`cuda` where a GPU is present, else `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def compute_device() -> torch.device:
    """The device of this process's parameters and activations."""
    return torch.device("cuda", torch.cuda.current_device()) if device_type() == "cuda" else torch.device("cpu")


def select_device(rank: int) -> None:
    """Bind this process to one of the GPUs that it sees, by rank, and all its threads to the CPUs near that GPU.

    Memory of the host that it touches first, pinned copies and an offloaded optimizer, then lies near the GPU too.
    """
    if device_type() == "cuda":
        index = rank % torch.cuda.device_count()
        torch.cuda.set_device(index)
        if cpus := _near_cpus(index) & os.sched_getaffinity(0):
            for thread in os.listdir("/proc/self/task"):
                with suppress(ProcessLookupError):  # It ended meanwhile.
                    os.sched_setaffinity(int(thread), cpus)


def _near_cpus(index: int) -> set[int]:
    """CPUs of the NUMA node of a GPU, as Linux says; none if it does not say."""
    # torch does not declare the fields of a place on the bus, which it reads in torch.numa itself.
    gpu: Any = torch.cuda.get_device_properties(index)
    place = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    try:
        ranges = (_PCI_DEVICES / place / "local_cpulist").read_text().strip()
    except OSError as error:
        log.info("no CPUs are known to be near GPU %s: %s", place, error)
        return set()
    bounds = [part.partition("-") for part in ranges.split(",") if part]
    return {cpu for first, _, last in bounds for cpu in range(int(first), int(last or first) + 1)}


def finish_queued_work() -> None:
    """Wait until the device has done what this thread has queued on its stream; a CPU queues nothing.

    Not for the whole device, where a transfer may be waiting for another process.
    """
    if device_type() == "cuda":
        torch.cuda.current_stream().synchronize()


def collective_backend() -> str:
    """Backend of torch.distributed for tensors on the compute device."""
    return "nccl" if device_type() == "cuda" else "gloo"


def computes_block_fp8() -> bool:
    """Whether engines here compute with weights in block FP8 as they are; elsewhere they get them dequantised.

    SGLang needs a GPU of compute capability 8.9 or newer. On older ones it repacks FP8 weights, which then cannot be
    updated, and on a CPU it needs AMX and a package of kernels that has no wheel for it.
    """
    return device_type() == "cuda" and torch.cuda.get_device_capability() >= (8, 9)


def packs_engine_weights() -> bool:
    """Whether SGLang's default kernels here store weights in other layouts than those in which they are loaded.

    It chooses such kernels from compute capability 10 (Blackwell) on.
    """
    return device_type() == "cuda" and torch.cuda.get_device_capability() >= (10, 0)


def has_transformer_engine() -> bool:
    """Whether models are built of Transformer Engine layers: it is installed, and there is a GPU to run it on."""
    return device_type() == "cuda" and importlib.util.find_spec("transformer_engine") is not None


def has_apex() -> bool:
    """Whether matrix products can add weight gradients to their buffer themselves, by a kernel of apex."""
    return device_type() == "cuda" and importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None


def load_transformer_engine() -> None:
    """Import Transformer Engine where models are built of its layers.

    Its package hides why its part for torch cannot be imported, and megatron-core then takes it for absent.

    Raises:
        ValueError: it is installed and cannot be imported, with the cause.
    """
    if not has_transformer_engine():
        return
    try:
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        raise ValueError(
            f"Transformer Engine is installed, but cannot be imported: {error!r}. It is compiled for one version of "
            "torch (docs/install.md); without the package models have Megatron's own layers."
        ) from error


def attention_problem() -> str | None:
    """Why Transformer Engine's attention will not do here, or None.

    Before compute capability 9 (Hopper) its only kernels for packed sequences are those of FlashAttention 2
    (`get_attention_backend`, and common/fused_attn/fused_attn.cpp, in version 2.19). Without these it computes
    attention unfused, in memory that grows with the square of the length, and without context parallelism.
    """
    if not has_transformer_engine() or torch.cuda.get_device_capability() >= (9, 0):
        return None
    if _is_installed("flash-attn"):
        return None
    return (
        f"{_this_gpu()}: before 9.0 Transformer Engine computes attention of packed sequences by FlashAttention 2 "
        "alone, which is not installed. Install flash-attn 2, or remove transformer-engine."
    )


FP8_CAPABILITIES: dict[Fp8Scaling, tuple[tuple[int, int], tuple[int, int] | None]] = {
    Fp8Scaling.blockwise: ((9, 0), None),
    Fp8Scaling.tensorwise: ((8, 9), None),
    Fp8Scaling.delayed: ((8, 9), None),
    Fp8Scaling.mxfp8: ((10, 0), (12, 0)),
}
"""Compute capabilities of FP8 training: the least, and the one from which on it is refused, as in Transformer Engine
2.19's pytorch/quantization.py"""


def fp8_problem(scaling: Fp8Scaling) -> str | None:
    """Why Transformer Engine cannot train so on this GPU, or None."""
    if device_type() != "cuda" or scaling not in FP8_CAPABILITIES:
        return None
    least, end = FP8_CAPABILITIES[scaling]
    if torch.cuda.get_device_capability() >= least and (end is None or torch.cuda.get_device_capability() < end):
        return None
    below = f", below {end[0]}.{end[1]}" if end else ""
    return f"{scaling.value} needs {least[0]}.{least[1]} or more{below}. {_this_gpu()}."


def _this_gpu() -> str:
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()} has compute capability {major}.{minor}"


def _is_installed(distribution: str) -> bool:
    with suppress(importlib.metadata.PackageNotFoundError):
        return bool(importlib.metadata.version(distribution))
    return False


def has_delta_net_kernels() -> bool:
    """Whether gated delta nets are computed by the kernels of flash-linear-attention; elsewhere by torch."""
    return device_type() == "cuda" and importlib.util.find_spec("fla") is not None
