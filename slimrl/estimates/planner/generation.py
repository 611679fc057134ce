"""A lower bound on the seconds of a rollout, in which decoding is limited by memory bandwidth.

A decoding step adds one token to each running sequence of an engine. It reads the dense weights, the experts that at
least one sequence is routed to, and the KV cache of all sequences (arXiv:2211.05102, section 2.1). States of linear
attention are read and written.
"""

from math import ceil

from slimrl.config.schema.credit import RefillMode
from slimrl.config.schema.recipe import Recipe
from slimrl.estimates.planner.engine import EnginePlan
from slimrl.estimates.planner.hardware import GB, TERA, Hardware
from slimrl.estimates.planner.shape import Shape


def sampled_prompts(recipe: Recipe) -> int:
    """Prompts of a step's first rollout: more than it trains on, where those of zero-variance groups are replaced. The
    rollouts after it depend on the rewards."""
    rollout, sampling = recipe.rollout, recipe.algorithm.dynamic_sampling
    if sampling.refill is RefillMode.off or rollout.spans_steps:
        return rollout.prompts_per_step
    return ceil(sampling.oversampling * rollout.prompts_per_step)


def rollout_at_least_s(
    recipe: Recipe,
    shape: Shape,
    engine: EnginePlan,
    hardware: Hardware,
    *,
    flops: float,
    length: int,
) -> float:
    """The longer of all operations at the engines' peak and all reads of decoding at the memory bandwidth.

    Assumes full batches to the end. A trajectory has at most `max_turns * max_new_tokens` sampled tokens.

    Args:
        flops: of all tokens of the rollout.
        length: mean tokens of a trajectory.
    """
    rollout = recipe.rollout
    gpus = rollout.num_engines * rollout.engine_tp
    sampled = min(length, rollout.max_turns * rollout.sampling.max_new_tokens)
    sequences = sampled_prompts(recipe) * rollout.samples_per_prompt / rollout.num_engines
    at_once = running_sequences(recipe, engine, length)
    in_group = at_once / rollout.engine_attention_dp
    read = decoding_step_bytes(shape, engine, sequences=at_once, in_group=in_group, context=length - sampled / 2)
    steps = sampled * sequences / at_once
    return max(flops / (gpus * hardware.peak_tflops * TERA), steps * read / (hardware.links.memory_gb_per_s * GB))


def running_sequences(recipe: Recipe, engine: EnginePlan, length: int) -> float:
    """Sequences that an engine runs at a time, limited by max_concurrency_per_engine, KV cache and states."""
    rollout = recipe.rollout
    present = max(sampled_prompts(recipe), rollout.oversample * rollout.prompts_per_step)
    each = present * rollout.samples_per_prompt / rollout.num_engines
    states = () if engine.sequences is None else (engine.sequences,)
    return max(1.0, min(each, rollout.max_concurrency_per_engine, engine.kv_tokens / length, *states))


def decoding_step_bytes(
    shape: Shape, engine: EnginePlan, *, sequences: float, in_group: float, context: float
) -> float:
    """Bytes that a decoding step reads or writes on one GPU.

    Args:
        sequences: of the engine.
        in_group: those of them whose attention the GPU computes.
        context: mean tokens of a sequence in the KV cache.
    """
    untouched = (1 - shape.topk / shape.experts) ** sequences if shape.experts else 0.0
    each = context * engine.kv_bytes_per_token + 2 * engine.state_bytes
    return engine.weights - engine.expert_weights * untouched + in_group * each
