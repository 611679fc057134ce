"""The first import of megatron.core, without what it brings along for seconds and slimrl has no use for.

1. wandb, for Megatron's own inference engine (inference/contexts/dynamic_context.py:70), which takes its absence.
2. Where there is no GPU, torch's compiler, into which jit.py:21 wraps about 40 functions; see
   `cuda_calls.run_jit_functions_eagerly`.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch


def import_megatron() -> None:
    """Import megatron.core, unless that has happened."""
    if "megatron.core" in sys.modules:
        return
    with _hidden("wandb"), nullcontext() if torch.cuda.is_available() else _compile_does_nothing():
        import megatron.core  # noqa: F401


@contextmanager
def _hidden(module: str) -> Iterator[None]:
    """To import it is an ImportError, unless it is imported already."""
    if module in sys.modules:
        yield
        return
    modules: dict[str, Any] = sys.modules
    modules[module] = None
    try:
        yield
    finally:
        del modules[module]


@contextmanager
def _compile_does_nothing() -> Iterator[None]:
    torch_module: Any = torch
    real = torch_module.compile
    torch_module.compile = _unchanged
    try:
        yield
    finally:
        torch_module.compile = real


def _unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
    """In place of torch.compile."""
    return function
