"""Process groups of one trainer rank, and the rank's position in the layout."""

import math
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from slimrl import device
from slimrl.config.schema.trainer import ParallelConfig
from slimrl.data.training import Layout

PIPELINE_SEED_STRIDE = 100
"""Distance of the pipeline stages' seeds; Megatron adds smaller numbers for the other ranks of a stage."""


def init_parallel(
    parallel: ParallelConfig,
    *,
    rank: int,
    world_size: int,
    meeting: str,
    timeout_s: float,
    seed: int,
    tile: int = 1,
) -> Layout:
    """Join the trainer's process group and build Megatron's groups on it.

    Args:
        meeting: where the ranks find each other: `tcp://address:port` of rank 0, or `file://path` on one node.
        timeout_s: deadline of the rendezvous and of every collective.
        seed: the seeds of the ranks' random-number states are derived from it.
        tile: a rank's tokens of a sequence are a multiple of it (slimrl.config.alignment).
    """
    device.select_device(rank)
    dist.init_process_group(
        device.collective_backend(),
        init_method=meeting,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    return init_model_parallel(parallel, timeout_s=timeout_s, seed=seed, tile=tile)


def init_model_parallel(parallel: ParallelConfig, *, timeout_s: float, seed: int, tile: int = 1) -> Layout:
    """Build Megatron's groups on the existing process group, and seed the random-number states."""
    make_groups(parallel, distributed_timeout_minutes=math.ceil(timeout_s / 60))
    seed_ranks(seed)
    return Layout(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        virtual_pipeline=parallel.virtual_pipeline or 1,
        expert=parallel.expert,
        expert_tensor=parallel.expert_tensor,
        context=parallel.context,
        data=mpu.get_data_parallel_world_size(),
        sequence=parallel.sequence,
        tensor_rank=mpu.get_tensor_model_parallel_rank(),
        pipeline_rank=mpu.get_pipeline_model_parallel_rank(),
        context_rank=mpu.get_context_parallel_rank(),
        data_rank=mpu.get_data_parallel_rank(),
        tile=tile,
    )


def make_groups(parallel: ParallelConfig, **options: Any) -> None:
    """Build Megatron's groups; `options` are further arguments of initialize_model_parallel."""
    mpu.initialize_model_parallel(
        parallel.tensor,
        parallel.pipeline,
        parallel.virtual_pipeline,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        **options,
    )


def seed_ranks(seed: int) -> None:
    """Seed this rank's random-number states: equal where ranks hold replicas, different where they hold shards."""
    stage_seed = seed + PIPELINE_SEED_STRIDE * mpu.get_pipeline_model_parallel_rank()
    model_parallel_cuda_manual_seed(stage_seed, force_reset_rng=True)


def destroy_parallel() -> None:
    """Leave all process groups."""
    mpu.destroy_model_parallel()
    dist.destroy_process_group()
