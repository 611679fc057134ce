"""Floating-point operations of a step, and the seconds that they take at a stated share of the GPUs' peak.

A matrix product of N weights costs 2 N operations a token forward and 4 N backward (arXiv:2001.08361, section 2.1), N
being the parameters that a token meets, without the embedding. Attention over a causal context of L tokens adds
2 L / 2 n (d + v) a token and layer forward, and twice that backward. What is recomputed is a forward pass more.
"""

from dataclasses import dataclass

from slimrl.config.schema import Recipe, TrainerConfig
from slimrl.planner.hardware import Hardware
from slimrl.planner.parameters import ModelParameters
from slimrl.planner.schedule import Batch, bubble_fraction
from slimrl.planner.shape import Shape

GB = 10**9
TERA = 10**12


@dataclass(frozen=True, kw_only=True)
class Work:
    """Of one step: one optimizer update of `slimrl sft`, one rollout and its updates of `slimrl train`."""

    training_flops: float
    logprob_flops: float
    generation_flops: float
    training_s: float
    """Updates, waiting in the pipeline included"""
    logprob_s: float
    rollout_at_least_s: float
    bubble: float
    """Share of an update that a stage waits"""


def forward_flops_per_token(shape: Shape, parameters: ModelParameters, length: int) -> float:
    """Mean over the tokens of a causal sequence of this length."""
    attention = shape.layers * length * shape.heads * (shape.query_columns + shape.value_columns)
    return 2.0 * parameters.active_without_embedding + attention


def step_work(
    recipe: Recipe,
    shape: Shape,
    parameters: ModelParameters,
    batch: Batch,
    hardware: Hardware,
    *,
    sft: bool,
    engine_weight_bytes: int,
) -> Work:
    """
    Args:
        engine_weight_bytes: of one engine GPU; 0 with `sft`.
    """
    trainer = recipe.trainer
    updates = 1 if sft else trainer.updates_per_rollout
    forward = forward_flops_per_token(shape, parameters, batch.trajectory_tokens) * batch.tokens * updates
    training = forward * (4 if trainer.megatron.get("recompute_granularity") == "full" else 3)
    bubble = bubble_fraction(trainer.parallel, batch.micro_batches)
    speed = trainer.num_ranks * hardware.peak_tflops * TERA * hardware.mfu * (1 - bubble) * _fill(trainer, batch)
    logprobs = 0.0 if sft else forward
    return Work(
        training_flops=training,
        logprob_flops=logprobs,
        generation_flops=0.0 if sft else forward,
        training_s=training / speed,
        logprob_s=logprobs / speed,
        rollout_at_least_s=0.0
        if sft
        else rollout_at_least_s(recipe, parameters, forward, batch.trajectory_tokens, hardware, engine_weight_bytes),
        bubble=bubble,
    )


def rollout_at_least_s(
    recipe: Recipe,
    parameters: ModelParameters,
    flops: float,
    length: int,
    hardware: Hardware,
    engine_weight_bytes: int,
) -> float:
    """No rollout is faster: the engines' peak over all tokens, and reading what one token meets of the weights once
    for each token of a trajectory of mean length, of which at most `max_turns * max_new_tokens` are sampled."""
    rollout = recipe.rollout
    gpus = rollout.num_engines * rollout.engine_tensor
    sampled = min(length, rollout.max_turns * rollout.sampling.max_new_tokens)
    read = engine_weight_bytes * parameters.active_without_embedding / parameters.total
    return max(flops / (gpus * hardware.peak_tflops * TERA), sampled * read / (hardware.links.memory_gb_per_s * GB))


def _fill(trainer: TrainerConfig, batch: Batch) -> float:
    """Share of the tokens of all micro-batches that are no padding: a rank passes over micro-batches of its own size
    alone, so that only the number of sequences that do not divide over ranks costs."""
    parallel = trainer.parallel
    data = trainer.num_ranks // (parallel.tensor * parallel.context * parallel.pipeline)
    sequences = batch.tokens // batch.trajectory_tokens
    per_rank = -(-sequences // data)
    return sequences / (per_rank * data)
