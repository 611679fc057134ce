"""Bytes of weights, gradients and optimizer states of a rank, which stay on its GPU from step to step.

They follow from megatron-core: DistributedDataParallel keeps gradients, and with the distributed optimizer weights too,
in one buffer for dense parameters and one for experts (distributed/param_and_grad_buffer.py), padded as there; the
distributed optimizer (ZeRO stage 1, arXiv:1910.02054) holds main weights and Adam's two moments of a rank's share of
each buffer. Shares are over data- and context-parallel ranks, for experts over expert-data-parallel ranks.
Left out: the padding of further buckets, of which `overlap_grad_reduce` makes several.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any

from slimrl.config.schema import ParallelConfig, Precision, TrainerConfig
from slimrl.planner.hardware import GB, Hardware
from slimrl.planner.parameters import Stage
from slimrl.trainer.build import ddp_config

PARAMETER_ALIGNMENT = 64
"""Elements at a multiple of which each parameter starts in a buffer of the distributed optimizer."""
BUCKET_ALIGNMENT = 128
"""Elements that a buffer's end is a multiple of, besides the number of ranks that share it."""
BUSBW_ALIGNMENT = 2**16
"""The same with `pad_buckets_for_high_nccl_busbw`."""

OFFLOADED_GRADIENT_BYTES = 4
"""Of a gradient's float32 copy, which an update on the host reads (optimizer/cpu_offloading/hybrid_optimizer.py)."""

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    weights: int
    gradients: int
    optimizer: int
    host: int
    """Of the optimizer and of the gradients that it reads, in the memory of the host (`optimizer_cpu_offload`)."""


def shares(parallel: ParallelConfig, num_ranks: int) -> tuple[int, int]:
    """Ranks over which the optimizer states of a dense parameter and of an expert are divided."""
    dense = num_ranks // (parallel.tensor * parallel.pipeline)
    return dense, num_ranks // (parallel.expert * parallel.expert_tensor * parallel.pipeline)


def state_bytes(stage: Stage, trainer: TrainerConfig) -> StateBytes:
    """Of a rank of the stage; of its optimizer the largest share that a rank has."""
    distributed, bf16 = trainer.optimizer.distributed, trainer.precision is Precision.bf16
    ddp, gradient = ddp_config(trainer), gradient_bytes(trainer)
    main, moments, scratch = _optimizer_bytes(trainer, gradient)
    elements = owned = 0
    for chunk in stage:
        for sizes, ranks in zip((chunk.dense, chunk.experts), shares(trainer.parallel, trainer.num_ranks), strict=True):
            if distributed:
                alignment = BUSBW_ALIGNMENT if ddp.pad_buckets_for_high_nccl_busbw else BUCKET_ALIGNMENT
                buffer = buffer_elements(sizes, lcm(ranks, alignment))
            else:
                buffer, ranks = sum(sizes), 1
            elements += buffer
            owned += buffer // ranks
    on_host = _offloaded(trainer.megatron)
    held = owned * (main + moments)
    return StateBytes(
        weights=elements * (2 if bf16 else 4),
        gradients=elements * gradient,
        optimizer=round(held * (1 - on_host)) + owned * scratch,
        host=round((held + owned * OFFLOADED_GRADIENT_BYTES) * on_host),
    )


def host_update_s(stage: Stage, trainer: TrainerConfig, hardware: Hardware) -> float:
    """Seconds of an update with Adam of what a rank has on the host; without the way there and back."""
    held = state_bytes(stage, trainer).host
    main, moments, _ = _optimizer_bytes(trainer, gradient_bytes(trainer))
    parameters = held / (main + moments + OFFLOADED_GRADIENT_BYTES)
    return parameters / (trainer.threads_per_rank * hardware.host_adam_gparams_per_s * GB)


def buffer_elements(sizes: Sequence[int], end_alignment: int) -> int:
    """Elements of a buffer in which these parameters lie one behind the other, the last first."""
    end = 0
    for size in reversed(sizes):
        end = _padded(end, PARAMETER_ALIGNMENT) + size
    return _padded(end, end_alignment)


def _padded(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def gradient_bytes(trainer: TrainerConfig) -> int:
    """Of one element, as it is kept and as it is reduced."""
    return 4 if ddp_config(trainer).grad_reduce_in_fp32 or trainer.precision is not Precision.bf16 else 2


def _optimizer_bytes(trainer: TrainerConfig, gradient: int) -> tuple[int, int, int]:
    """Bytes per parameter of the main weight, of both moments, and of a gradient's copy that the update needs.

    Without `use_precision_aware_optimizer` the dtype fields are float32. The main weight of a float32 model is the
    weight itself.
    """
    fields = trainer.megatron
    bf16 = trainer.precision is Precision.bf16
    if not fields.get("use_precision_aware_optimizer"):
        return (4 if bf16 else 0), 8, (4 if gradient < 4 else 0)
    moments = _dtype_bytes(fields.get("exp_avg_dtype")) + _dtype_bytes(fields.get("exp_avg_sq_dtype"))
    return (_dtype_bytes(fields.get("main_params_dtype")) if bf16 else 0), moments, 0


def _dtype_bytes(name: Any) -> int:
    return _DTYPE_BYTES[name or "float32"]


def _offloaded(fields: dict[str, Any]) -> float:
    return float(fields.get("optimizer_offload_fraction") or 0.0) if fields.get("optimizer_cpu_offload") else 0.0
