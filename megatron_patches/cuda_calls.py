"""Calls into torch.cuda that megatron-core makes without checking for a GPU."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

CPU = torch.device("cpu")


class NullStream:
    """Stands in for torch.cuda.Stream and torch.cuda.Event: operations on the CPU are synchronous."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self


def replace_torch_cuda() -> None:
    """megatron-core calls device, stream, random-state and memory functions of torch.cuda in about 200 places.

    Examples are in tensor_parallel/layers.py and mappings.py, pipeline_parallel/p2p_communication.py,
    distributed/param_and_grad_buffer.py and transformer/moe/token_dispatcher.py. Here `current_device()` returns the
    CPU's torch.device, so that `device=torch.cuda.current_device()` means the CPU. Only functions that raise without a
    GPU are replaced: `is_available()` and `device_count()` still tell the truth.
    """
    cuda: Any = torch.cuda
    cuda.Stream = type("Stream", (NullStream,), {})
    cuda.Event = type("Event", (NullStream,), {})
    null = NullStream()
    # Each name needs its own function object: torch._dynamo keys its rules by object and refuses duplicates.
    _put("current_device", lambda: lambda: CPU)
    _put("set_device synchronize empty_cache reset_peak_memory_stats", lambda: lambda *args, **kwargs: None)
    _put("nvtx.range_push nvtx.range_pop", lambda: lambda *args, **kwargs: None)
    _put("current_stream default_stream", lambda: lambda *args, **kwargs: null)
    _put("stream", lambda: lambda *args, **kwargs: contextlib.nullcontext())
    _put("manual_seed manual_seed_all", lambda: lambda seed: torch.default_generator.manual_seed(seed))
    _put("get_rng_state random.get_rng_state", lambda: lambda *args, **kwargs: torch.get_rng_state())
    _put("set_rng_state random.set_rng_state", lambda: lambda state, *args, **kwargs: torch.set_rng_state(state))
    memory = "memory_allocated max_memory_allocated memory_reserved max_memory_reserved"
    _put(memory, lambda: lambda *args, **kwargs: 0)


def make_cuda_moves_identity() -> None:
    """Tensor.cuda() and Module.cuda() raise without a GPU; here they return the tensor or module itself.

    tensor_parallel/data.py, utils.py, models/common/language_module/language_module.py,
    dist_checkpointing/exchange_utils.py and optimizer/distrib_optimizer.py call them.
    """
    tensor: Any = torch.Tensor
    module: Any = torch.nn.Module
    tensor.cuda = lambda self, *args, **kwargs: self
    module.cuda = lambda self, *args, **kwargs: self


def run_jit_functions_eagerly() -> None:
    """jit.py wraps about 40 functions in torch.compile while megatron.core is being imported.

    `disable_jit_fuser()` comes too late for those. slimrl imports megatron.core while torch.compile does nothing, which
    also saves the second that importing torch's compiler takes. If something else has imported megatron.core before,
    the compiler is set to run eagerly. Eager execution is exact and needs no C++ compiler at run time.
    """
    from megatron.core import jit

    if jit.jit_fuser is torch.compile:
        torch.compiler.set_stance("force_eager")


def _put(names: str, make: Callable[[], Any]) -> None:
    for name in names.split():
        *path, attribute = name.split(".")
        setattr(functools.reduce(getattr, path, torch.cuda), attribute, make())
