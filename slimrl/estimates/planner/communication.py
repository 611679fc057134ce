"""Seconds of communication in an update, if nothing overlaps with computation.

A ring over n ranks moves (n - 1) / n of a tensor through each of them. A group within a node uses NVLink, a larger one
the network. Ranks are ordered as in megatron-core: tensor, context, expert or data, pipeline.

1. Tensor parallelism: an all-gather and a reduce-scatter of the residual stream around attention, and around an MLP or
   shared experts, forward and backward (arXiv:2205.05198, section 4.2.2); without sequence parallelism an all-reduce of
   the same volume. Routed experts need none, since their tokens stay sharded (megatron-core, moe/token_dispatcher.py).
2. Context parallelism: keys and values go round the ring forward, and with their gradients backward. A gated delta net
   exchanges the projections of its tokens for those of some heads of all tokens, and the results back (megatron-core,
   ssm/gated_delta_net), forward and backward.
3. Expert parallelism: an all-to-all to the experts and one back, forward and backward; with expert tensor parallelism
   also an all-gather and a reduce-scatter.
4. Pipeline parallelism: the residual stream forward and its gradient backward, per chunk.
5. Data parallelism: per update a reduce-scatter of gradients and an all-gather of new weights.

Full recompute adds a forward pass per stage. Log-probs are a forward pass only.
"""

from dataclasses import dataclass, replace

from slimrl.config.schema.trainer import TrainerConfig
from slimrl.estimates.planner.hardware import GB, Hardware
from slimrl.estimates.planner.model_state import data_parallel_sizes, gradient_bytes
from slimrl.estimates.planner.parameters import Stage
from slimrl.estimates.planner.schedule import Batch
from slimrl.estimates.planner.shape import Shape


@dataclass(frozen=True, kw_only=True)
class Communication:
    """Seconds of communication on the rank that sends the most."""

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
    """Communication of one update; for each kind of parallelism on the busiest stage."""
    forwards = 2 if trainer.megatron.get("recompute_granularity") == "full" else 1
    passes = _passes(shape, trainer, layers, batch, hardware, forwards=forwards, backwards=1)
    return replace(passes, data_s=max(_data_seconds(stage, trainer, hardware) for stage in stages))


def logprob_communication(
    shape: Shape, trainer: TrainerConfig, layers: list[list[int]], batch: Batch, hardware: Hardware
) -> Communication:
    """Communication of a forward pass over the tokens of one update."""
    return _passes(shape, trainer, layers, batch, hardware, forwards=1, backwards=0)


def _passes(
    shape: Shape,
    trainer: TrainerConfig,
    layers: list[list[int]],
    batch: Batch,
    hardware: Hardware,
    *,
    forwards: int,
    backwards: int,
) -> Communication:
    """Communication of these passes over all micro-batches of an update; a recomputed forward pass sends nothing
    between stages."""
    parallel, tokens = trainer.parallel, trainer.max_tokens_per_rank
    width = trainer.precision.element_bytes
    residual = tokens * shape.hidden * width
    residual_shard = residual / (parallel.tensor if parallel.sequence else 1)
    most_sparse = max(sum(shape.sparse[layer] for layer in held) for held in layers)
    # Tensor-parallel blocks of a layer: attention, and an MLP or shared experts.
    blocks = [2 if not sparse or shape.shared_columns else 1 for sparse in shape.sparse]
    most_gathered = max(sum(blocks[layer] for layer in held) for held in layers)
    tensor = 2 * (forwards + backwards) * most_gathered * _ring(residual, parallel.tensor, parallel.tensor, hardware)
    ring = (forwards + 2 * backwards) * shape.kv_heads * (shape.query_columns + shape.value_columns)
    swap = (forwards + backwards) * _exchanged_columns(shape) / parallel.context
    columns = max(sum(swap if shape.linear[layer] else ring for layer in held) for held in layers)
    through = (parallel.context - 1) * columns / parallel.tensor * tokens * width
    context = through / _rate(parallel.tensor * parallel.context, hardware)
    routed = residual_shard * shape.topk * hardware.expert_load
    spread = parallel.expert * parallel.expert_tensor
    gathered = _ring(routed * parallel.expert_tensor, parallel.expert_tensor, parallel.expert_tensor, hardware)
    expert = 2 * (forwards + backwards) * most_sparse * (_ring(routed, parallel.expert, spread, hardware) + gathered)
    hops = (parallel.virtual_pipeline or 1) if parallel.pipeline > 1 else 0
    # Neighbouring stages share a node only if all stages do.
    pipeline = (1 + backwards) * hops * residual_shard / _rate(trainer.num_ranks, hardware)
    return Communication(
        tensor_s=tensor * batch.micro_batches,
        context_s=context * batch.micro_batches,
        expert_s=expert * batch.micro_batches,
        pipeline_s=pipeline * batch.micro_batches,
        data_s=0.0,
    )


def _exchanged_columns(shape: Shape) -> int:
    """Columns that a gated delta net exchanges: queries, keys, values and gates, a step and a decay per value head, and
    results."""
    keys = shape.linear_keys * shape.linear_key_columns
    values = shape.linear_values * shape.linear_value_columns
    return 2 * keys + 2 * values + 2 * shape.linear_values + values


def _data_seconds(stage: Stage, trainer: TrainerConfig, hardware: Hardware) -> float:
    parallel = trainer.parallel
    dense_ranks, expert_ranks = data_parallel_sizes(parallel, trainer.num_ranks)
    element = gradient_bytes(trainer) + trainer.precision.element_bytes
    dense = sum(sum(chunk.dense) for chunk in stage) * element
    experts = sum(sum(chunk.experts) for chunk in stage) * element
    return _ring(dense, dense_ranks, parallel.tensor * dense_ranks, hardware) + _ring(
        experts, expert_ranks, parallel.expert * parallel.expert_tensor * expert_ranks, hardware
    )


def _ring(nbytes: float, ranks: int, spread: int, hardware: Hardware) -> float:
    return nbytes * (ranks - 1) / ranks / _rate(spread, hardware)


def _rate(spread: int, hardware: Hardware) -> float:
    """Bytes per second of a group that spans `spread` consecutive ranks."""
    links = hardware.links
    return (links.nvlink_gb_per_s if spread <= hardware.gpus_per_node else links.network_gb_per_s) * GB
