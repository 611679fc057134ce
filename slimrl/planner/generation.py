"""Seconds that a rollout takes at least: decoding is reading, of weights and of the cache of keys and values.

A decoding step gives one token to each sequence that an engine runs. It reads the dense weights, the experts that at
least one of the sequences is routed to, and the cache of all of them (arXiv:2211.05102, section 2.1).
"""

from slimrl.config.schema import Recipe
from slimrl.planner.engine import EnginePlan
from slimrl.planner.hardware import GB, TERA, Hardware
from slimrl.planner.parameters import ModelParameters
from slimrl.planner.shape import Shape


def rollout_at_least_s(
    recipe: Recipe,
    shape: Shape,
    parameters: ModelParameters,
    engine: EnginePlan,
    hardware: Hardware,
    *,
    flops: float,
    length: int,
) -> float:
    """The engines' peak over all operations, or the memory's speed over all that decoding reads, whichever is longer.

    Engines have full batches until they are done. Of a trajectory at most `max_turns * max_new_tokens` are sampled.

    Args:
        flops: of all tokens of the rollout.
        length: mean tokens of a trajectory.
    """
    rollout = recipe.rollout
    gpus = rollout.num_engines * rollout.engine_tensor
    sampled = min(length, rollout.max_turns * rollout.sampling.max_new_tokens)
    sequences = rollout.prompts_per_step * rollout.samples_per_prompt / rollout.num_engines
    at_once = running_sequences(recipe, engine, length)
    read = decoding_step_bytes(shape, parameters, engine, sequences=at_once, context=length - sampled / 2)
    steps = sampled * sequences / at_once
    return max(flops / (gpus * hardware.peak_tflops * TERA), steps * read / (hardware.links.memory_gb_per_s * GB))


def running_sequences(recipe: Recipe, engine: EnginePlan, length: int) -> float:
    """Of one engine at a time: as many as there are, as may run, and as the cache holds."""
    rollout = recipe.rollout
    each = rollout.prompts_per_step * rollout.samples_per_prompt / rollout.num_engines
    return max(1.0, min(each, rollout.max_concurrency_per_engine, engine.kv_tokens / length))


def decoding_step_bytes(
    shape: Shape, parameters: ModelParameters, engine: EnginePlan, *, sequences: float, context: float
) -> float:
    """Read on one GPU.

    Args:
        context: mean tokens of a sequence whose keys and values are read.
    """
    experts = 0.0
    if shape.experts > shape.topk:
        # A token leaves out all experts but topk, and with them that many parameters.
        left_out = (parameters.total - parameters.active) / (shape.experts - shape.topk)
        experts = left_out * shape.experts / parameters.total
    touched = 1 - (1 - shape.topk / shape.experts) ** sequences if shape.experts else 0.0
    return engine.weights * (1 - experts + experts * touched) + sequences * context * engine.kv_bytes_per_token
