"""A lower bound on the seconds of a rollout, in which decoding is limited by memory bandwidth.

A decoding step adds one token to each running sequence of an engine. It reads the dense weights, the experts that at
least one sequence is routed to, and the KV cache of all sequences (arXiv:2211.05102, section 2.1).
"""

from slimrl.config.schema import Recipe
from slimrl.planner.engine import EnginePlan
from slimrl.planner.hardware import GB, TERA, Hardware
from slimrl.planner.shape import Shape


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
    sequences = rollout.prompts_per_step * rollout.samples_per_prompt / rollout.num_engines
    at_once = running_sequences(recipe, engine, length)
    cached = at_once / rollout.engine_attention_dp * (length - sampled / 2)
    read = decoding_step_bytes(shape, engine, sequences=at_once, cached=cached)
    steps = sampled * sequences / at_once
    return max(flops / (gpus * hardware.peak_tflops * TERA), steps * read / (hardware.links.memory_gb_per_s * GB))


def running_sequences(recipe: Recipe, engine: EnginePlan, length: int) -> float:
    """Sequences that an engine runs at a time, limited by max_concurrency_per_engine and the KV cache."""
    rollout = recipe.rollout
    each = rollout.prompts_per_step * rollout.samples_per_prompt / rollout.num_engines
    return max(1.0, min(each, rollout.max_concurrency_per_engine, engine.kv_tokens / length))


def decoding_step_bytes(shape: Shape, engine: EnginePlan, *, sequences: float, cached: float) -> float:
    """Bytes that a decoding step reads on one GPU.

    Args:
        sequences: of the engine.
        cached: tokens in the KV cache of the GPU.
    """
    untouched = (1 - shape.topk / shape.experts) ** sequences if shape.experts else 0.0
    return engine.weights - engine.expert_weights * untouched + cached * engine.kv_bytes_per_token
