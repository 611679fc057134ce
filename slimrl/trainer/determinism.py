"""Training that repeats: the same results from the same seed, on a GPU too.

On a CPU operations repeat as they are. On a GPU some add in the order in which threads come: torch and Megatron then
choose other algorithms, and torch raises an error at an operation that has none. The variables that Transformer Engine,
cuBLAS and NCCL read are those of config/env_vars.py, because a process has them from its start.
"""

from dataclasses import replace

import torch

from slimrl import device
from slimrl.config.schema.trainer import TrainerConfig


def make_deterministic(trainer: TrainerConfig) -> TrainerConfig:
    """Switch this process to algorithms that repeat; returns the settings with which Megatron does so too."""
    if device.device_type() != "cuda":
        return trainer
    torch.use_deterministic_algorithms(True)
    return replace(trainer, megatron={**trainer.megatron, "deterministic_mode": True})
