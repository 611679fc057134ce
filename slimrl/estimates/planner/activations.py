"""Bytes that the forward pass of a micro-batch keeps for its backward pass, by layer and recompute setting.

Counted as in Korthikanti et al. 2022 (arXiv:2205.05198, section 4): every tensor that a backward pass reads, once. The
layer differs from theirs: gated MLPs, grouped-query and multi-latent attention, experts, flash attention, which keeps
no scores (arXiv:2205.14135), and no dropout.
With T tokens on this rank, t tensor-parallel ranks, s = t with sequence parallelism and else 1, b bytes an element:

| part | elements |
|---|---|
| two norms: input and output | 4 h T / s |
| latents (MLA): before and after their norm, and the rotated key | (2 (q + c) + r) T / s |
| queries, keys, values | (n d + g (d + v)) T / t; queries and keys again where they are normed; MLA: n (3 d - r + v) |
| result of attention, and a float32 sum of exponentials per head | n v T / t, n T / t |
| gate of attention's result: before and after, and their product | 2 n v T / t more |
| gated delta net: G and N heads of keys and values, the former copied N / G times | see `_delta_net` |
| MLP and shared experts: both columns of the gate, and their product | 3 f T / t |
| router: logits, scores, probabilities in float32 | 3 E T / s |
| experts: input, both columns of the gate, their product | k T / s e (h + 3 f / e) for e = ETP ranks |

Routers are assumed to send equally many tokens to every rank, times `expert_load` on the busiest.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from slimrl.config.schema.trainer import TrainerConfig
from slimrl.estimates.planner.schedule import chunks_in_flight
from slimrl.estimates.planner.shape import Shape


@dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """Bytes of activations of one layer and one micro-batch."""

    residual: float
    """Bytes of the inputs of both norms"""
    norms: float
    latents: float
    projections: float
    attention: float
    statistics: float
    mlp: float
    """Bytes of the MLP of a layer without experts"""
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
        """Bytes of the larger of attention and MLP; its gradients exist at the same time."""
        attention = self.latents + self.projections + self.attention
        return max(attention, self.mlp + self.expert_inputs + self.expert_gates + self.expert_products + self.shared)


def layer_bytes(
    shape: Shape, trainer: TrainerConfig, *, sparse: bool, linear: bool = False, expert_load: float = 1.0
) -> LayerBytes:
    """Activations of a layer without recompute; `linear`: with a gated delta net instead of attention."""
    parallel = trainer.parallel
    width = trainer.precision.element_bytes
    tokens = trainer.max_tokens_per_rank
    shard = tokens / parallel.tensor
    sequence = tokens / (parallel.tensor if parallel.sequence else 1)
    latents = 2 * (shape.query_latent + shape.kv_latent) + shape.rotary_columns if shape.kv_latent else 0
    routed = sequence * shape.topk * parallel.expert_tensor * expert_load if sparse else 0.0
    projected, results = _projected_columns(shape), shape.heads * shape.value_columns
    results *= 3 if shape.output_gate else 1
    statistics = shape.heads
    if linear:
        projected, results, statistics = _delta_net(shape)
    return LayerBytes(
        residual=2 * shape.hidden * sequence * width,
        norms=2 * shape.hidden * sequence * width,
        latents=latents * sequence * width,
        projections=projected * shard * width,
        attention=results * shard * width,
        statistics=statistics * shard * 4,
        mlp=0.0 if sparse else 3 * shape.dense_columns * shard * width,
        router=3 * shape.experts * sequence * 4 if sparse else 0.0,
        expert_inputs=routed * shape.hidden * width,
        expert_gates=routed * 2 * shape.expert_columns / parallel.expert_tensor * width,
        expert_products=routed * shape.expert_columns / parallel.expert_tensor * width,
        shared=3 * shape.shared_columns * shard * width if sparse else 0.0,
    )


def kept(layer: LayerBytes, modules: Sequence[str]) -> LayerBytes:
    """The activations that remain when these modules are recomputed (`recompute_granularity: selective`)."""
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
    """Peak bytes of activations on a rank of a stage.

    The activations of all micro-batches in flight, plus the recomputed activations of the layer in its backward pass
    and the gradients of its larger block, assumed to be as large as its activations.

    Args:
        layers: of all virtual stages, which are assumed to be equal.
    """
    if not layers:
        return 0
    by_layer = [
        layer_bytes(shape, trainer, sparse=shape.sparse[i], linear=shape.linear[i], expert_load=expert_load)
        for i in layers
    ]
    chunks = trainer.parallel.virtual_pipeline or 1
    held, again = _by_recompute(by_layer, chunks, trainer.megatron)
    flights = chunks_in_flight(trainer.parallel, stage, micro_batches)
    gradients = max(layer.block for layer in by_layer)
    # Input and output of the norm before the output layer.
    head = by_layer[0].norms if stage == trainer.parallel.pipeline - 1 else 0.0
    return round(held * flights / chunks + again + gradients + head)


def logits_bytes(shape: Shape, trainer: TrainerConfig, *, mtp_layers: int = 0) -> int:
    """Bytes on the last stage: logits of a micro-batch and their gradient in the dtype of the training, and one chunk's
    float32 softmax, which has two tensors at a time (slimrl/trainer/vocab_parallel.py).

    Args:
        mtp_layers: that are trained; each has logits of its own, whose gradients come one after the other.
    """
    rows = -(-shape.vocab // trainer.parallel.tensor)
    tokens = trainer.max_tokens_per_rank
    chunk = min(tokens, trainer.logprob_chunk_tokens)
    return rows * (tokens * (2 + mtp_layers) * trainer.precision.element_bytes + chunk * 4 * 2)


def _by_recompute(layers: Sequence[LayerBytes], num_chunks: int, megatron: dict[str, Any]) -> tuple[float, float]:
    """(bytes that a micro-batch keeps over all of the stage's layers, bytes recomputed for one backward pass)."""
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
        # The first `count` layers of each chunk, as a mean over chunks.
        recomputed = min(len(layers), count * num_chunks)
        return sum(inputs[:recomputed]) + sum(whole[recomputed:]), max(whole) if recomputed else 0.0
    groups = [range(start, min(start + count, len(layers))) for start in range(0, len(layers), count)]
    return sum(inputs[group.start] for group in groups), max(sum(whole[i] for i in group) for group in groups)


def _projected_columns(shape: Shape) -> int:
    """Queries, keys and values; with MLA queries and keys, and the up-projection that contains keys and values."""
    queries = shape.heads * shape.query_columns
    if shape.kv_latent:
        unrotated = shape.query_columns - shape.rotary_columns
        return 2 * queries + shape.heads * (unrotated + shape.value_columns)
    keys = shape.kv_heads * shape.query_columns
    return (2 if shape.qk_norm else 1) * (queries + keys) + shape.kv_heads * shape.value_columns


def _delta_net(shape: Shape) -> tuple[int, int, int]:
    """Elements per token: of projections and their copies, of results, and of float32 decays and steps.

    Queries, keys and values before and after the convolution, the gate, and queries and keys with length 1 for every
    value head; results before and after their norm and gate.
    """
    keys = shape.linear_keys * shape.linear_key_columns
    values = shape.linear_values * shape.linear_value_columns
    copied = shape.linear_values * shape.linear_key_columns
    return 2 * (2 * keys + values) + values + 2 * copied, 2 * values, 2 * shape.linear_values
