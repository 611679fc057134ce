"""Seconds that the ranks of an update spend sending to each other, were nothing of it hidden behind computation.

A ring over n ranks moves (n - 1) / n of a tensor through each of them. A group that fits into a node uses NVLink, a
larger one the network. Ranks are numbered tensor, context, expert or data, pipeline, as megatron-core does.

1. Tensor parallelism: an all-gather and a reduce-scatter of the residual stream about attention and about the MLP,
   forward and backward (arXiv:2205.05198, section 4.2.2); without sequence parallelism an all-reduce, which is as much.
2. Context parallelism: keys and values pass round the ring forward, they and their gradients backward.
3. Expert parallelism: tokens go to their experts and come back, forward and backward; with expert tensor parallelism
   they are gathered and scattered besides.
4. Pipeline parallelism: the residual stream forward and its gradient backward, per chunk.
5. Data parallelism: once an update, gradients are reduced and scattered, new weights gathered.

With full recompute the forward pass sends once more.
"""

from dataclasses import dataclass

from slimrl.config.schema import Precision, TrainerConfig
from slimrl.planner.hardware import Hardware
from slimrl.planner.model_state import shares
from slimrl.planner.parameters import Stage
from slimrl.planner.schedule import Batch
from slimrl.planner.shape import Shape

GB = 10**9


@dataclass(frozen=True, kw_only=True)
class Communication:
    """Seconds of one update on the rank that sends most."""

    tensor_s: float
    context_s: float
    expert_s: float
    pipeline_s: float
    data_s: float

    @property
    def total_s(self) -> float:
        return sum(vars(self).values())


def update_communication(
    shape: Shape, trainer: TrainerConfig, stages: list[Stage], layers: list[list[int]], batch: Batch, hardware: Hardware
) -> Communication:
    """The busiest stage of each kind."""
    parallel, tokens = trainer.parallel, trainer.max_tokens_per_rank
    width = 2 if trainer.precision is Precision.bf16 else 4
    residual = tokens * shape.hidden * width
    most_layers = max(map(len, layers))
    most_sparse = max(sum(shape.sparse[layer] for layer in held) for held in layers)
    passes = 3 if trainer.megatron.get("recompute_granularity") == "full" else 2
    tensor = 4 * passes * most_layers * _ring(residual, parallel.tensor, parallel.tensor, hardware)
    keys = shape.kv_heads * (shape.query_columns + shape.value_columns) / parallel.tensor * tokens * width
    through = (parallel.context - 1) * keys
    context = (passes + 1) * most_layers * through / _rate(parallel.tensor * parallel.context, hardware)
    routed = residual / (parallel.tensor if parallel.sequence else 1) * shape.topk * hardware.expert_load
    spread = parallel.expert * parallel.expert_tensor
    gathered = _ring(routed * parallel.expert_tensor, parallel.expert_tensor, parallel.expert_tensor, hardware)
    expert = 2 * passes * most_sparse * (_ring(routed, parallel.expert, spread, hardware) + gathered)
    boundary = residual / (parallel.tensor if parallel.sequence else 1)
    hops = (parallel.virtual_pipeline or 1) if parallel.pipeline > 1 else 0
    pipeline = 2 * hops * boundary / (hardware.links.network_gb_per_s * GB)
    return Communication(
        tensor_s=tensor * batch.micro_batches,
        context_s=context * batch.micro_batches,
        expert_s=expert * batch.micro_batches,
        pipeline_s=pipeline * batch.micro_batches,
        data_s=max(_data_seconds(stage, trainer, width, hardware) for stage in stages),
    )


def _data_seconds(stage: Stage, trainer: TrainerConfig, width: int, hardware: Hardware) -> float:
    """Gradients are float32 while they are reduced."""
    parallel = trainer.parallel
    dense_ranks, expert_ranks = shares(parallel, trainer.num_ranks)
    dense = sum(sum(chunk.dense) for chunk in stage) * (4 + width)
    experts = sum(sum(chunk.experts) for chunk in stage) * (4 + width)
    return _ring(dense, dense_ranks, parallel.tensor * dense_ranks, hardware) + _ring(
        experts, expert_ranks, parallel.expert * parallel.expert_tensor * expert_ranks, hardware
    )


def _ring(nbytes: float, ranks: int, spread: int, hardware: Hardware) -> float:
    return nbytes * (ranks - 1) / ranks / _rate(spread, hardware)


def _rate(spread: int, hardware: Hardware) -> float:
    """Bytes a second of a group that reaches over so many neighbouring ranks."""
    links = hardware.links
    return (links.nvlink_gb_per_s if spread <= hardware.gpus_per_node else links.network_gb_per_s) * GB
