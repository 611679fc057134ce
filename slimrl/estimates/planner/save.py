"""Bytes of host memory that a rank needs to save a checkpoint, on top of what it holds already. A GPU needs none.

With the distributed optimizer:

1. Gather (megatron_patches/checkpointing.py). The first rank of each data-parallel group gets main weights and both
   moments of whole buffers, in float32: 12 bytes an element. All ranks copy their shard of one of the three at a time
   into memory for the largest one, and the first receives it in pieces.
2. Stage (trainer/checkpointing/writing.py) and write. The first ranks write for their group. Weights are copied to the
   host first, and what was gathered stays there, while training goes on.
"""

from collections.abc import Iterator
from math import lcm

from slimrl.config.schema.trainer import TrainerConfig
from slimrl.estimates.planner.model_state import (
    BUCKET_ALIGNMENT,
    BUSBW_ALIGNMENT,
    buffer_elements,
    data_parallel_sizes,
    optimizer_bytes,
)
from slimrl.estimates.planner.parameters import Stage
from slimrl.trainer.build import ddp_config

GATHERED_BYTES = 12
"""Bytes of an element that is gathered: its main weight and both moments in float32, whatever the optimizer's own
dtypes"""
PIECE_ELEMENTS = 2**26
"""Number of elements that the first rank receives at a time, as in megatron_patches/checkpointing.py"""
SHARD_BYTES = 4
"""Bytes of an element of a shard of one of the three"""


def node_save_bytes(stage: Stage, trainer: TrainerConfig, ranks_per_node: int, adapters: Stage | None = None) -> int:
    """Bytes for all ranks of a pipeline stage on the node that holds its first ones.

    Megatron counts tensor-parallel ranks first, and in the layout of experts their tensor- and expert-parallel ranks.
    """
    parallel = trainer.parallel
    firsts = parallel.tensor, parallel.expert * parallel.expert_tensor
    ranks = range(min(ranks_per_node, trainer.num_ranks // parallel.pipeline))
    return sum(save_bytes(stage, trainer, (rank < firsts[0], rank < firsts[1]), adapters) for rank in ranks)


def node_copy_bytes(stage: Stage, trainer: TrainerConfig, ranks_per_node: int, adapters: Stage | None = None) -> int:
    """Bytes of the files in memory of all ranks of a pipeline stage on the node that holds its first ones.

    The first ranks write the weights, and each rank the states of the optimizer that it has.
    """
    if not trainer.optimizer.distributed:
        return node_save_bytes(stage, trainer, ranks_per_node, adapters)
    parallel, trained = trainer.parallel, stage if adapters is None else adapters
    firsts = parallel.tensor, parallel.expert * parallel.expert_tensor
    weights = states = 0
    for rank in range(min(ranks_per_node, trainer.num_ranks // parallel.pipeline)):
        first = rank < firsts[0], rank < firsts[1]
        written = _elements(stage, first) + (0 if adapters is None else _elements(adapters, first))
        weights += written * trainer.precision.element_bytes
        states += sum(GATHERED_BYTES * padded // ranks for _, padded, ranks, _ in _buffers(trained, trainer, first))
    return weights + states


def save_bytes(stage: Stage, trainer: TrainerConfig, first: tuple[bool, bool], adapters: Stage | None = None) -> int:
    """Bytes for a rank of the stage.

    Args:
        first: whether it is the first of its data-parallel group for dense parameters, and for experts.
        adapters: of the stage; None if its own weights are trained.
    """
    trained = stage if adapters is None else adapters
    owned = _elements(trained, first)
    weights = (_elements(stage, first) + (0 if adapters is None else owned)) * trainer.precision.element_bytes
    if not trainer.optimizer.distributed:
        return weights + optimizer_bytes(trainer) * owned
    held = shard = 0
    for elements, padded, ranks, is_first in _buffers(trained, trainer, first):
        held += GATHERED_BYTES * elements * is_first
        shard = max(shard, padded // ranks + min(padded, PIECE_ELEMENTS) * is_first)
    return held + max(SHARD_BYTES * shard, weights)


def _elements(stage: Stage, first: tuple[bool, bool]) -> int:
    """Number of parameters whose states this rank writes."""
    return sum(sum(chunk.dense) * first[0] + sum(chunk.experts) * first[1] for chunk in stage)


def _buffers(stage: Stage, trainer: TrainerConfig, first: tuple[bool, bool]) -> Iterator[tuple[int, int, int, bool]]:
    """(elements, elements with the padding at its end, ranks that share it, whether this is their first) of each
    buffer, in the order in which they are gathered."""
    sharding = data_parallel_sizes(trainer.parallel, trainer.num_ranks)
    alignment = BUSBW_ALIGNMENT if ddp_config(trainer).pad_buckets_for_high_nccl_busbw else BUCKET_ALIGNMENT
    for kind, ranks in enumerate(sharding):
        for chunk in stage:
            sizes = (chunk.dense, chunk.experts)[kind]
            yield buffer_elements(sizes, 1), buffer_elements(sizes, lcm(ranks, alignment)), ranks, first[kind]
