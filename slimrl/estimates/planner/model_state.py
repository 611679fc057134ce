"""Bytes of a rank's weights, gradients and optimizer states, which stay on its GPU from step to step.

They follow megatron-core: DistributedDataParallel keeps gradients, and with the distributed optimizer weights too, in
one padded buffer for dense parameters and one for experts (distributed/param_and_grad_buffer.py). The distributed
optimizer (ZeRO stage 1, arXiv:1910.02054) holds main weights and Adam's two moments of a rank's shard of each buffer.
Shards are over data- and context-parallel ranks, for experts over expert-data-parallel ranks.
With adapters only these have gradients and optimizer states; all other weights are in no buffer.
Ignored: the padding between the buckets of `overlap_grad_reduce`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from slimrl.config.alignment import round_up
from slimrl.config.schema.precision import Precision
from slimrl.config.schema.trainer import ParallelConfig, TrainerConfig
from slimrl.config.trainer_rules import STATE_DTYPES
from slimrl.estimates.planner.hardware import GB, Hardware
from slimrl.estimates.planner.parameters import Stage, stage_total
from slimrl.trainer.build import ddp_config

PARAMETER_ALIGNMENT = 64
"""Elements to whose multiple each parameter's start is aligned in a buffer of the distributed optimizer."""
BUCKET_ALIGNMENT = 128
"""Elements to whose multiple a buffer's size is padded, and to one of the number of ranks that shard it."""
BUSBW_ALIGNMENT = 2**16
"""Elements to whose multiple a buffer's size is padded instead with `pad_buckets_for_high_nccl_busbw`."""

OFFLOADED_GRADIENT_BYTES = 4
"""Bytes of a gradient's float32 copy on the host, for the update there
(optimizer/cpu_offloading/hybrid_optimizer.py)."""

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    weights: int
    gradients: int
    optimizer: int
    host: int
    """Bytes of optimizer states and gradients in host memory (`optimizer_cpu_offload`)"""


def data_parallel_sizes(parallel: ParallelConfig, num_ranks: int) -> tuple[int, int]:
    """Numbers of ranks that shard the optimizer states of a dense parameter (data x context parallel), and of an
    expert."""
    dense = num_ranks // (parallel.tensor * parallel.pipeline)
    return dense, num_ranks // (parallel.expert * parallel.expert_tensor * parallel.pipeline)


def state_bytes(stage: Stage, trainer: TrainerConfig, adapters: Stage | None = None) -> StateBytes:
    """Bytes of a rank of the stage; for the optimizer those of the largest shard.

    Args:
        adapters: of the stage; None if its own weights are trained.
    """
    distributed = trainer.optimizer.distributed
    ddp, gradient = ddp_config(trainer), gradient_bytes(trainer)
    main, moments, scratch = _optimizer_bytes(trainer, gradient)
    sharding = data_parallel_sizes(trainer.parallel, trainer.num_ranks)
    elements = owned = 0
    for chunk in stage if adapters is None else adapters:
        for sizes, ranks in zip((chunk.dense, chunk.experts), sharding, strict=True):
            if distributed:
                alignment = BUSBW_ALIGNMENT if ddp.pad_buckets_for_high_nccl_busbw else BUCKET_ALIGNMENT
                buffer = buffer_elements(sizes, lcm(ranks, alignment))
            else:
                buffer, ranks = sum(sizes), 1
            elements += buffer
            owned += buffer // ranks
    fields = trainer.megatron
    on_host = float(fields.get("optimizer_offload_fraction") or 0.0) if fields.get("optimizer_cpu_offload") else 0.0
    held = owned * (main + moments)
    return StateBytes(
        weights=(elements + (0 if adapters is None else stage_total(stage))) * trainer.precision.element_bytes,
        gradients=elements * gradient,
        optimizer=round(held * (1 - on_host)) + owned * scratch,
        host=round((held + owned * OFFLOADED_GRADIENT_BYTES) * on_host),
    )


def host_update_s(stage: Stage, trainer: TrainerConfig, hardware: Hardware, adapters: Stage | None = None) -> float:
    """Seconds of the Adam update of a rank's host memory, without the copies to and from the GPU."""
    held = state_bytes(stage, trainer, adapters).host
    main, moments, _ = _optimizer_bytes(trainer, gradient_bytes(trainer))
    parameters = held / (main + moments + OFFLOADED_GRADIENT_BYTES)
    return parameters / (trainer.threads_per_rank * hardware.host_adam_gparams_per_s * GB)


def buffer_elements(sizes: Sequence[int], end_alignment: int) -> int:
    """Number of elements of a buffer that holds these parameters in reverse order."""
    end = 0
    for size in reversed(sizes):
        end = round_up(end, PARAMETER_ALIGNMENT) + size
    return round_up(end, end_alignment)


def gradient_bytes(trainer: TrainerConfig) -> int:
    """Bytes of one element of a gradient."""
    return 4 if ddp_config(trainer).grad_reduce_in_fp32 or trainer.precision is not Precision.bf16 else 2


def optimizer_bytes(trainer: TrainerConfig) -> int:
    """Bytes for one parameter: its main weight and both moments."""
    return sum(_optimizer_bytes(trainer, gradient_bytes(trainer))[:2])


def _optimizer_bytes(trainer: TrainerConfig, gradient: int) -> tuple[int, int, int]:
    """Bytes per parameter of the main weight, both moments, and the update's float32 copy of the gradient.

    Without `use_precision_aware_optimizer` all are float32. A float32 model has no separate main weights.
    """
    fields = trainer.megatron
    bf16 = trainer.precision is Precision.bf16
    if not fields.get("use_precision_aware_optimizer"):
        return (4 if bf16 else 0), 8, (4 if gradient < 4 else 0)
    main, *moments = (_DTYPE_BYTES[fields.get(name) or "float32"] for name in STATE_DTYPES)
    return (main if bf16 else 0), sum(moments), 0
