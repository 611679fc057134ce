"""Bytes that the forward pass of a micro-batch leaves for its backward pass, by layer and recompute setting.

The way of counting is that of Korthikanti et al. 2022 (arXiv:2205.05198, section 4): every tensor that a backward pass
reads, once. What differs from the layer there: gated MLPs, grouped-query and multi-latent attention, experts, a flash
attention that keeps no scores (arXiv:2205.14135), and no dropout.
With T tokens on this rank, t tensor-parallel ranks, s = t with sequence parallelism and else 1, b bytes an element:

| part | elements |
|---|---|
| two norms: input and output | 4 h T / s |
| latents (MLA): before and after their norm, and the rotated key | (2 (q + c) + r) T / s |
| queries, keys, values | (n d + g (d + v)) T / t; queries and keys again where they are normed; MLA: n (3 d - r + v) |
| result of attention, and a float32 sum of exponentials per head | n v T / t, n T / t |
| MLP and shared experts: both columns of the gate, and their product | 3 f T / t |
| router: logits, scores, probabilities in float32 | 3 E T / s |
| experts: input, both columns of the gate, their product | k T / s e (h + 3 f / e) for e = ETP ranks |

Routers are taken to send equally many tokens to every rank; `expert_load` is the factor of the busiest one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from slimrl.config.schema import ParallelConfig, Precision, TrainerConfig
from slimrl.planner.schedule import chunks_in_flight
from slimrl.planner.shape import Shape


@dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """Of one layer and one micro-batch."""

    residual: float
    """Inputs of both norms"""
    norms: float
    latents: float
    projections: float
    attention: float
    statistics: float
    mlp: float
    """Of a layer without experts"""
    router: float
    expert_inputs: float
    expert_gates: float
    expert_products: float
    shared: float

    @property
    def total(self) -> float:
        return sum(vars(self).values())

    @property
    def block(self) -> float:
        """The larger of attention and MLP, whose gradients live together."""
        attention = self.latents + self.projections + self.attention
        return max(attention, self.mlp + self.expert_inputs + self.expert_gates + self.expert_products + self.shared)


def layer_bytes(shape: Shape, trainer: TrainerConfig, *, sparse: bool, expert_load: float = 1.0) -> LayerBytes:
    """What a layer keeps where nothing is recomputed."""
    parallel = trainer.parallel
    width = 2 if trainer.precision is Precision.bf16 else 4
    tokens = trainer.max_tokens_per_rank
    cut = tokens / parallel.tensor
    sequence = tokens / (parallel.tensor if parallel.sequence else 1)
    routed = sequence * shape.topk * parallel.expert_tensor * expert_load if sparse else 0.0
    return LayerBytes(
        residual=2 * shape.hidden * sequence * width,
        norms=2 * shape.hidden * sequence * width,
        latents=_latent_columns(shape) * sequence * width,
        projections=_projected_columns(shape) * cut * width,
        attention=shape.heads * shape.value_columns * cut * width,
        statistics=shape.heads * cut * 4,
        mlp=0.0 if sparse else 3 * shape.dense_columns * cut * width,
        router=3 * shape.experts * sequence * 4 if sparse else 0.0,
        expert_inputs=routed * shape.hidden * width,
        expert_gates=routed * 2 * shape.expert_columns / parallel.expert_tensor * width,
        expert_products=routed * shape.expert_columns / parallel.expert_tensor * width,
        shared=3 * shape.shared_columns * cut * width if sparse else 0.0,
    )


def kept(layer: LayerBytes, modules: Sequence[str]) -> LayerBytes:
    """What is left of it when these modules are computed again (`recompute_granularity: selective`)."""
    gone: dict[str, tuple[str, ...]] = {
        "core_attn": ("statistics",),
        "layernorm": ("norms",),
        "mla_up_proj": ("projections",),
        "mlp": ("mlp",),
        "moe": ("router", "expert_inputs", "expert_gates", "expert_products", "shared"),
        "moe_act": ("expert_products",),
        "shared_experts": ("shared",),
    }
    return replace(layer, **{part: 0.0 for module in modules for part in gone[module]})


def stage_activations(
    shape: Shape,
    trainer: TrainerConfig,
    layers: Sequence[int],
    stage: int,
    *,
    micro_batches: int,
    expert_load: float = 1.0,
) -> int:
    """Bytes of activations on a rank of a stage at their most.

    Those of all micro-batches in flight, and while one layer's backward pass runs, what is recomputed of it and the
    gradients of its larger block, which are taken to be as large as what they are gradients of.

    Args:
        layers: of all of the stage's virtual stages, which are taken to be alike.
    """
    if not layers:
        return 0
    by_layer = [layer_bytes(shape, trainer, sparse=shape.sparse[i], expert_load=expert_load) for i in layers]
    chunks = trainer.parallel.virtual_pipeline or 1
    held, again = _by_recompute(by_layer, chunks, trainer.megatron)
    flights = chunks_in_flight(trainer.parallel, stage, micro_batches)
    working = max(layer.block for layer in by_layer)
    return round(held * flights / chunks + again + working + _head_bytes(shape, trainer, stage))


def logits_bytes(shape: Shape, trainer: TrainerConfig) -> int:
    """Of the last stage: float32 logits of a micro-batch and their gradient, one chunk's softmax, and in bf16 the
    gradient once more in bf16. The chunk has four tensors at a time (slimrl/trainer/forward.py)."""
    rows = -(-shape.vocab // trainer.parallel.tensor)
    tokens = trainer.max_tokens_per_rank
    chunk = min(tokens, trainer.logprob_chunk_tokens)
    each = 4 + 4 + (2 if trainer.precision is Precision.bf16 else 0)
    return rows * (tokens * each + chunk * 4 * 4)


def _by_recompute(layers: Sequence[LayerBytes], num_chunks: int, megatron: dict[str, Any]) -> tuple[float, float]:
    """(held by one micro-batch over all of the stage's layers, computed again for one backward pass at a time)."""
    granularity = megatron.get("recompute_granularity")
    whole = [layer.total for layer in layers]
    inputs = [layer.residual / 2 for layer in layers]
    if granularity is None:
        return sum(whole), 0.0
    if granularity == "selective":
        modules = megatron.get("recompute_modules") or ["core_attn"]
        left = [kept(layer, modules).total for layer in layers]
        return sum(left), max(a - b for a, b in zip(whole, left, strict=True))
    count = int(megatron.get("recompute_num_layers") or 1)
    if megatron.get("recompute_method") == "block":
        # The first `count` layers of each chunk; where chunks differ in length this is their mean.
        recomputed = min(len(layers), count * num_chunks)
        return sum(inputs[:recomputed]) + sum(whole[recomputed:]), max(whole) if recomputed else 0.0
    groups = [range(start, min(start + count, len(layers))) for start in range(0, len(layers), count)]
    return sum(inputs[group.start] for group in groups), max(sum(whole[i] for i in group) for group in groups)


def _head_bytes(shape: Shape, trainer: TrainerConfig, stage: int) -> float:
    """Input and output of the norm before the output layer."""
    if stage != trainer.parallel.pipeline - 1:
        return 0.0
    width = 2 if trainer.precision is Precision.bf16 else 4
    return 2 * shape.hidden * _sequence_tokens(trainer.parallel, trainer.max_tokens_per_rank) * width


def _sequence_tokens(parallel: ParallelConfig, tokens: int) -> float:
    return tokens / (parallel.tensor if parallel.sequence else 1)


def _latent_columns(shape: Shape) -> int:
    return 2 * (shape.query_latent + shape.kv_latent) + shape.rotary_columns if shape.kv_latent else 0


def _projected_columns(shape: Shape) -> int:
    """Queries, keys and values; with MLA the projection that keys and values are parts of besides the keys."""
    queries = shape.heads * shape.query_columns
    if shape.kv_latent:
        unrotated = shape.query_columns - shape.rotary_columns
        return 2 * queries + shape.heads * (unrotated + shape.value_columns)
    keys = shape.kv_heads * shape.query_columns
    return (2 if shape.qk_norm else 1) * (queries + keys) + shape.kv_heads * shape.value_columns
