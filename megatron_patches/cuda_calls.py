"""Calls into torch.cuda that megatron-core makes without asking whether there is a GPU."""

import contextlib
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
    """Device, stream, random-state and memory functions of torch.cuda are called about 200 times unguarded.

    First hits: tensor_parallel/layers.py:873, tensor_parallel/mappings.py:91,
    pipeline_parallel/p2p_communication.py:190, distributed/param_and_grad_buffer.py:800,
    transformer/moe/token_dispatcher.py:445. `current_device()` may return a torch.device, so that
    `device=torch.cuda.current_device()` means the CPU. Functions that raise without a GPU are replaced and no others:
    `is_available()` and `device_count()` keep telling the truth.
    """
    cuda: Any = torch.cuda
    cuda.Stream = type("Stream", (NullStream,), {})
    cuda.Event = type("Event", (NullStream,), {})
    null = NullStream()
    # Every name gets a function object of its own: torch._dynamo keys its rules by object and refuses duplicates.
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
    """Tensor.cuda() and Module.cuda() raise without a GPU; here they return what they were called on.

    tensor_parallel/data.py:84, utils.py:898, models/common/language_module/language_module.py:244,
    dist_checkpointing/exchange_utils.py:336 and 499, optimizer/distrib_optimizer.py:1089.
    """
    tensor: Any = torch.Tensor
    module: Any = torch.nn.Module
    tensor.cuda = lambda self, *args, **kwargs: self
    module.cuda = lambda self, *args, **kwargs: self


def run_jit_functions_eagerly() -> None:
    """jit.py:21 binds torch.compile into about 40 functions while megatron.core is being imported.

    `disable_jit_fuser()` comes too late for those. megatron.core is imported here while torch.compile does nothing, so
    that torch's compiler is not imported either, which takes a second. Where another has imported it before, the
    compiler is told to step aside. Eager execution is exact and needs no C++ compiler at run time.
    """
    from megatron.core import jit

    if jit.jit_fuser is torch.compile:
        torch.compiler.set_stance("force_eager")


def _put(names: str, make: Callable[[], Any]) -> None:
    for name in names.split():
        *path, attribute = name.split(".")
        owner: Any = torch.cuda
        for part in path:
            owner = getattr(owner, part)
        setattr(owner, attribute, make())
