"""How many micro-batches an update has, how many of them a pipeline stage holds at once, and how long stages wait.

The schedules are megatron-core's (pipeline_parallel/schedules.py): one forward, one backward, plain or interleaved
(arXiv:2104.04473, section 2.2).
"""

from dataclasses import dataclass
from math import ceil

from slimrl.config.schema import ParallelConfig, Recipe


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What an update is made of."""

    tokens: int
    """Of one update, all ranks together"""
    trajectory_tokens: int
    """Mean length of what is trained on"""
    micro_batches: int
    """Of each data-parallel rank"""


def update_batch(recipe: Recipe, *, sft: bool, mean_tokens: int | None) -> Batch:
    """Sequences are taken to be all of the mean length, and micro-batches to be full.

    Args:
        mean_tokens: length of a trajectory or conversation; None for the longest that the recipe allows.
    """
    trainer, parallel = recipe.trainer, recipe.trainer.parallel
    if sft:
        length, sequences = mean_tokens or recipe.sft.max_tokens, recipe.sft.batch_conversations
    else:
        rollout = recipe.rollout
        length = mean_tokens or rollout.max_trajectory_tokens
        sequences = rollout.prompts_per_step * rollout.samples_per_prompt // trainer.updates_per_rollout
    data = trainer.num_ranks // (parallel.tensor * parallel.context * parallel.pipeline)
    budget = trainer.max_tokens_per_rank * parallel.context
    fitting = max(1, budget // length)
    count = ceil(max(1, sequences) / (fitting * data))
    group = parallel.pipeline if (parallel.virtual_pipeline or 1) > 1 else 1
    return Batch(tokens=sequences * length, trajectory_tokens=length, micro_batches=ceil(count / group) * group)


def chunks_in_flight(parallel: ParallelConfig, stage: int, micro_batches: int) -> int:
    """Passes through a chunk of this stage's layers whose activations wait for their backward pass, at most.

    Without virtual stages the chunk is all of the stage.
    """
    virtual = parallel.virtual_pipeline or 1
    behind = parallel.pipeline - stage - 1
    warm_up = behind if virtual == 1 else 2 * behind + (virtual - 1) * parallel.pipeline
    return min(warm_up + 1, virtual * micro_batches)


def bubble_fraction(parallel: ParallelConfig, micro_batches: int) -> float:
    """Share of an update in which a stage waits: (p - 1) / (v m + p - 1), from arXiv:2104.04473, section 2.2."""
    waiting = parallel.pipeline - 1
    return waiting / ((parallel.virtual_pipeline or 1) * micro_batches + waiting)
