"""A check before the start that the nodes of a cluster have room for checkpoints in memory."""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slimrl.base.errors import StageError
from slimrl.config.restart_rules import IN_MEMORY
from slimrl.config.schema.recipe import Recipe
from slimrl.runtime.checks.memory_check import GIB, copies_bytes, no_room, shared_memory_free
from slimrl.runtime.cluster.memory_nodes import own_node
from slimrl.runtime.cluster.placement import Node, Placement

NODES_TIMEOUT_S = 60.0
"""Deadline for all nodes to answer; most of the time goes into starting a process."""


def check_shared_memory(recipe: Recipe, placement: Placement, spares: Sequence[Node]) -> None:
    """Compare what is free in /dev/shm of nodes with what checkpoints take there at least: the nodes with ranks
    together, and each spare one, and the driver's if it has no ranks, with the share of a node.

    Args:
        spares: nodes that ranks may move to.

    Raises:
        StageError: they have too little, or do not answer.
    """
    with_ranks = list({slot.node.node_id: slot.node for slot in (*placement.ranks, *placement.critics)}.values())
    own = own_node()
    without = [node for node in (own, *spares) if node.node_id not in {other.node_id for other in with_ranks}]
    count = len(with_ranks) + (own in without)
    if not with_ranks or not (needed := copies_bytes(recipe, count, with_critic=bool(placement.critics))):
        return
    asked = [*with_ranks, *without]
    try:
        free = dict(zip(asked, ray.get([_asked(node) for node in asked], timeout=NODES_TIMEOUT_S), strict=True))
    except ray.exceptions.RayError as error:
        raise StageError(f"{IN_MEMORY}: nodes did not answer: {type(error).__name__}", str(error)) from error
    # What a node's ranks write of two checkpoints. A driver's node without ranks has copies of it.
    share = needed // (2 * len(with_ranks))
    together = needed - share * (own in without)
    if sum(free[node] for node in with_ranks) < together:
        _refuse(together, {node: free[node] for node in with_ranks})
    if small := {node: free[node] for node in without if free[node] < share}:
        _refuse(share, small)


def _refuse(needed: int, free: Mapping[Node, int]) -> NoReturn:
    there = ", ".join(f"{nbytes / GIB:.1f} GiB on {node.name}" for node, nbytes in free.items())
    raise StageError(f"{IN_MEMORY}: {no_room(needed, f'are {there}')}")


def _asked(node: Node) -> Any:
    there = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
    return _free.options(scheduling_strategy=there).remote()


@ray.remote(max_retries=0, num_cpus=0)
def _free() -> int:
    return shared_memory_free()
