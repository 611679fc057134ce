"""Ends Megatron's process groups, so that a process can take part in one layout after another.

A group of Gloo has three threads, which look for messages a hundred times a second until the last reference to it is
gone. Without this module, dozens of layouts in one process take whole cores from all that comes after them.
"""

import gc
from collections.abc import Iterable

import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import nn


def leave_groups() -> None:
    """End all groups but the world."""
    mpu.destroy_model_parallel()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    gc.collect()


def take_apart(chunks: Iterable[nn.Module]) -> None:
    """Drop the references of a trained model, which is never collected: hooks of its gradients refer to it."""
    for module in [module for chunk in chunks for module in chunk.modules()]:
        vars(module).clear()
    gc.collect()
