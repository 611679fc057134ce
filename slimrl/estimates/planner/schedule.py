"""Micro-batches of an update, micro-batches in flight on a pipeline stage, and the pipeline bubble.

The schedules are megatron-core's (pipeline_parallel/schedules.py): 1F1B, plain or interleaved (arXiv:2104.04473,
section 2.2).
"""

from dataclasses import dataclass
from math import ceil

from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.trainer import ParallelConfig


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The tokens and micro-batches of an update."""

    tokens: int
    """Number of tokens on all ranks"""
    trajectory_tokens: int
    """Mean length of a trajectory or conversation in tokens"""
    micro_batches: int
    """Number of micro-batches of each data-parallel rank"""


def longest_tokens(recipe: Recipe, *, sft: bool) -> int:
    """Maximum length of a trajectory or conversation."""
    return recipe.sft.max_tokens if sft else recipe.rollout.max_trajectory_tokens


def update_batch(recipe: Recipe, *, sft: bool, mean_tokens: int | None) -> Batch:
    """Assumes that all sequences have the mean length and that micro-batches are full.

    Args:
        mean_tokens: length of a trajectory or conversation; None for the longest that the recipe allows.
    """
    trainer, parallel, rollout = recipe.trainer, recipe.trainer.parallel, recipe.rollout
    trajectories = rollout.prompts_per_step * rollout.samples_per_prompt // trainer.updates_per_rollout
    sequences = recipe.sft.batch_conversations if sft else trajectories
    length = mean_tokens or longest_tokens(recipe, sft=sft)
    data = parallel.data(trainer.num_ranks)
    budget = trainer.max_tokens_per_rank * parallel.context
    fitting = max(1, budget // length)
    count = ceil(max(1, sequences) / (fitting * data))
    group = parallel.pipeline if (parallel.virtual_pipeline or 1) > 1 else 1
    return Batch(tokens=sequences * length, trajectory_tokens=length, micro_batches=ceil(count / group) * group)


def chunks_in_flight(parallel: ParallelConfig, stage: int, micro_batches: int) -> int:
    """Maximum number of forward passes through a model chunk of this stage that wait for their backward pass.

    Without virtual stages the chunk is the whole stage.
    """
    virtual = parallel.virtual_pipeline or 1
    behind = parallel.pipeline - stage - 1
    warm_up = behind if virtual == 1 else 2 * behind + (virtual - 1) * parallel.pipeline
    return min(warm_up + 1, virtual * micro_batches)


def bubble_fraction(parallel: ParallelConfig, micro_batches: int) -> float:
    """Fraction of an update in which a stage waits: (p - 1) / (v m + p - 1), from arXiv:2104.04473, section 2.2."""
    waiting = parallel.pipeline - 1
    return waiting / ((parallel.virtual_pipeline or 1) * micro_batches + waiting)
