"""Process groups of one trainer rank, and where that rank stands in the layout."""

import math
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from slimrl import device
from slimrl.config.schema import ParallelConfig

PIPELINE_SEED_STRIDE = 100
"""Pipeline stages draw from seeds this far apart; Megatron derives those of other ranks by adding smaller numbers."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of all parallel dimensions, and this rank's place in them."""

    rank: int
    world_size: int
    tensor: int
    pipeline: int
    virtual_pipeline: int
    expert: int
    expert_tensor: int
    context: int
    data: int
    sequence: bool
    tensor_rank: int
    pipeline_rank: int
    context_rank: int
    data_rank: int

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline_rank == self.pipeline - 1

    @property
    def reports(self) -> bool:
        """Whether this rank returns the log-probs of its data-parallel group: exactly one of each group does."""
        return self.is_last_stage and self.tensor_rank == 0 and self.context_rank == 0

    @property
    def alignment(self) -> int:
        """Every packed sequence is padded to a multiple of this many tokens."""
        return self.tensor * (2 * self.context if self.context > 1 else 1)

    @property
    def micro_batch_multiple(self) -> int:
        """The interleaved schedule takes micro-batches in groups of the pipeline size."""
        return self.pipeline if self.virtual_pipeline > 1 else 1

    def sizes(self) -> dict[str, int]:
        """What two layouts must share for a rank's own state, such as its random-number state, to carry over."""
        places = {"rank", "tensor_rank", "pipeline_rank", "context_rank", "data_rank"}
        return {name: int(value) for name, value in asdict(self).items() if name not in places}


def init_parallel(
    parallel: ParallelConfig,
    *,
    rank: int,
    world_size: int,
    master_addr: str,
    master_port: int,
    timeout_s: float,
    seed: int,
) -> Layout:
    """Join the trainer's process group and build Megatron's groups on it.

    Args:
        timeout_s: deadline of the rendezvous and of every collective.
        seed: of the random-number states; those of different ranks are derived from it.
    """
    device.select_device(rank)
    dist.init_process_group(
        device.collective_backend(),
        init_method=f"tcp://{master_addr}:{master_port}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    return init_model_parallel(parallel, timeout_s=timeout_s, seed=seed)


def init_model_parallel(parallel: ParallelConfig, *, timeout_s: float, seed: int) -> Layout:
    """Build Megatron's groups on a process group that exists, and seed the random-number states."""
    mpu.initialize_model_parallel(
        parallel.tensor,
        parallel.pipeline,
        parallel.virtual_pipeline,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        distributed_timeout_minutes=math.ceil(timeout_s / 60),
    )
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
    )


def seed_ranks(seed: int) -> None:
    """Seed this rank's random-number states: equal where ranks hold replicas, different where they hold shards."""
    stage_seed = seed + PIPELINE_SEED_STRIDE * mpu.get_pipeline_model_parallel_rank()
    model_parallel_cuda_manual_seed(stage_seed, force_reset_rng=True)


def destroy_parallel() -> None:
    """Leave all process groups."""
    mpu.destroy_model_parallel()
    dist.destroy_process_group()
