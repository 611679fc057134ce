"""A check before the start that the nodes of a cluster have room for checkpoints in memory."""

from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slimrl.base.errors import StageError
from slimrl.config.restart_rules import IN_MEMORY
from slimrl.config.schema.recipe import Recipe
from slimrl.runtime.checks.memory_check import GIB, copies_bytes, no_room, shared_memory_free
from slimrl.runtime.cluster.placement import Node, Placement

NODES_TIMEOUT_S = 60.0
"""Deadline for all nodes to answer; most of the time goes into starting a process."""


def check_shared_memory(recipe: Recipe, placement: Placement) -> None:
    """Compare what is free in /dev/shm of the nodes with ranks with what checkpoints take at least.

    Raises:
        StageError: they have too little together, or do not answer.
    """
    nodes = list(dict.fromkeys(slot.node for slot in (*placement.ranks, *placement.critics)))
    if not nodes or not (needed := copies_bytes(recipe, len(nodes))):
        return
    try:
        free = dict(zip(nodes, ray.get([_asked(node) for node in nodes], timeout=NODES_TIMEOUT_S), strict=True))
    except ray.exceptions.RayError as error:
        raise StageError(f"{IN_MEMORY}: nodes did not answer: {type(error).__name__}", str(error)) from error
    if sum(free.values()) < needed:
        there = ", ".join(f"{nbytes / GIB:.1f} GiB on {node.name}" for node, nbytes in free.items())
        raise StageError(f"{IN_MEMORY}: {no_room(needed, f'are {there}')}")


def _asked(node: Node) -> Any:
    there = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
    return _free.options(scheduling_strategy=there).remote()


@ray.remote(max_retries=0, num_cpus=0)
def _free() -> int:
    return shared_memory_free()
