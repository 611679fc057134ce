"""The one place that answers what hardware this process computes on, and what follows from it."""

import importlib.util

import torch


def device_type() -> str:
    """`cuda` where a GPU is present, else `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def compute_device() -> torch.device:
    """The device of this process's parameters and activations."""
    return torch.device("cuda", torch.cuda.current_device()) if device_type() == "cuda" else torch.device("cpu")


def select_device(rank: int) -> None:
    """Bind this process to one of the GPUs that it sees, by rank."""
    if device_type() == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())


def collective_backend() -> str:
    """Backend of torch.distributed for tensors on the compute device."""
    return "nccl" if device_type() == "cuda" else "gloo"


def broadcasts_in_place() -> bool:
    """Whether weights are broadcast from where they lie to where they belong, a tensor at a time, or packed.

    On a CPU a copy takes as long as the broadcast. A GPU copies a hundred times faster than its network sends, and
    large messages suit that better.
    """
    return device_type() == "cpu"


def computes_block_fp8() -> bool:
    """Whether engines here compute with weights in block FP8 as they are; elsewhere they get them dequantised.

    SGLang needs a GPU of compute capability 8.9 or newer. On older ones it repacks FP8 weights, which then cannot be
    updated, and on a CPU it needs AMX and a package of kernels that has no wheel for it.
    """
    return device_type() == "cuda" and torch.cuda.get_device_capability() >= (8, 9)


def has_transformer_engine() -> bool:
    """Whether models are built of Transformer Engine layers: it is installed, and there is a GPU to run it on."""
    return device_type() == "cuda" and importlib.util.find_spec("transformer_engine") is not None
