"""Floating-point operations of a step, and their seconds at a given model FLOPs utilisation (MFU).

A matrix product of N weights costs 2 N operations per token forward and 4 N backward (arXiv:2001.08361, section 2.1);
N is the number of active parameters without the embedding. Attention over a causal context of L tokens adds
2 L / 2 n (d + v) per token and layer forward, and twice that backward. Recompute adds a forward pass.

A gated delta net adds a number that does not grow with L: each of its value heads reads its state [d, v] twice and
writes it once, 6 d v, and multiplies triangular matrices within a chunk of 64 tokens, 64 (2 d + 2 v).
"""

from dataclasses import dataclass

from slimrl.algorithms.passes import num_passes
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.trainer import TrainerConfig
from slimrl.estimates.planner.engine import EnginePlan
from slimrl.estimates.planner.generation import rollout_at_least_s, sampled_prompts
from slimrl.estimates.planner.hardware import TERA, Hardware
from slimrl.estimates.planner.parameters import ModelParameters
from slimrl.estimates.planner.schedule import Batch, bubble_fraction
from slimrl.estimates.planner.shape import Shape

DELTA_CHUNK = 64
"""Number of tokens that the kernels of a gated delta net take at a time."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Operations and seconds of one step: one optimizer update of `slimrl sft`, one rollout and its updates of `slimrl
    train`."""

    training_flops: float
    logprob_flops: float
    generation_flops: float
    training_s: float
    """Seconds of the updates, pipeline bubble included"""
    logprob_s: float
    """Seconds of the passes before the updates"""
    rollout_at_least_s: float
    bubble: float
    """Fraction of an update in which a stage waits"""


def forward_flops_per_token(shape: Shape, parameters: ModelParameters, length: int) -> float:
    """Operations of the forward pass per token, as a mean over the tokens of a causal sequence of this length."""
    attention = shape.attention_layers * length * shape.heads * (shape.query_columns + shape.value_columns)
    keys, values = shape.linear_key_columns, shape.linear_value_columns
    per_head = 6 * keys * values + 2 * DELTA_CHUNK * (keys + values)
    linear = sum(shape.linear) * shape.linear_values * per_head
    return 2.0 * parameters.active_without_embedding + attention + linear


def mtp_flops_per_token(shape: Shape, forward: float, layers: int) -> float:
    """Operations of a forward pass of MTP layers, each taken for a mean layer of the model, and of the output layer
    again.

    Args:
        forward: of the model, per token.
    """
    return layers * (forward / shape.layers + 2.0 * shape.hidden * shape.vocab)


def step_work(
    recipe: Recipe,
    shape: Shape,
    parameters: ModelParameters,
    batch: Batch,
    hardware: Hardware,
    *,
    engine: EnginePlan | None,
    mtp: int = 0,
) -> Work:
    """
    Args:
        engine: None with `slimrl sft`.
        mtp: layers for multi-token prediction that are trained.
    """
    trainer = recipe.trainer
    updates = trainer.updates_per_rollout if engine else 1
    per_token = forward_flops_per_token(shape, parameters, batch.trajectory_tokens)
    of_update = per_token * batch.tokens
    forward = of_update * updates
    forward_passes = 4 if trainer.megatron.get("recompute_granularity") == "full" else 3
    training = (forward + batch.tokens * updates * mtp_flops_per_token(shape, per_token, mtp)) * forward_passes
    bubble = bubble_fraction(trainer.parallel, batch.micro_batches)
    speed = trainer.num_ranks * hardware.peak_tflops * TERA * hardware.mfu * (1 - bubble) * _fill(trainer, batch)
    generated = forward * sampled_prompts(recipe) / recipe.rollout.prompts_per_step if engine else 0.0
    logprobs = of_update * num_passes(recipe) if engine else 0.0
    return Work(
        training_flops=training,
        logprob_flops=logprobs,
        generation_flops=generated,
        training_s=training / speed,
        logprob_s=logprobs / speed,
        rollout_at_least_s=rollout_at_least_s(
            recipe, shape, engine, hardware, flops=generated, length=batch.trajectory_tokens
        )
        if engine
        else 0.0,
        bubble=bubble,
    )


def _fill(trainer: TrainerConfig, batch: Batch) -> float:
    """Balance of the sequences over data-parallel ranks: their mean over their largest number on a rank. Micro-batches
    are not padded to a common size, so nothing else costs."""
    data = trainer.parallel.data(trainer.num_ranks)
    sequences = batch.tokens // batch.trajectory_tokens
    per_rank = -(-sequences // data)
    return sequences / (per_rank * data)
