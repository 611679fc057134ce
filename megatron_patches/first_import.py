"""The first import of megatron.core, without slow imports and warnings that slimrl does not need.

1. wandb, for Megatron's own inference engine (inference/engines/dynamic_engine.py), which works without it.
2. Without a GPU, torch's compiler, in which jit.py wraps about 40 functions; see
   `cuda_calls.run_jit_functions_eagerly`.
3. Warnings that a user cannot act on (`NOTICES`).
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

NOTICES = (
    "torch.utils.cpp_extension",  # a CUDA toolkit without a GPU, as on a login node
    "megatron.core.models.gpt.gpt_model",  # GPTModel gets no new features
    "megatron.core.distributed.distributed_data_parallel",  # the layout of its buffers is computed here
    "megatron.core.dist_checkpointing.serialization",  # the folder of a save is not empty
    "megatron.core.dist_checkpointing.strategies.torch",  # another library could save asynchronously
)
"""Loggers whose warnings are hidden, with what they warn of; errors are shown."""


def import_megatron() -> None:
    if "megatron.core" in sys.modules:
        return
    for name in NOTICES:
        logging.getLogger(name).setLevel(logging.ERROR)
    with _hidden("wandb"), nullcontext() if torch.cuda.is_available() else _compile_does_nothing():
        import megatron.core  # noqa: F401


@contextmanager
def _hidden(module: str) -> Iterator[None]:
    """Importing the module raises ImportError, unless it has been imported already."""
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
    torch_module.compile = lambda function: function
    try:
        yield
    finally:
        torch_module.compile = real
