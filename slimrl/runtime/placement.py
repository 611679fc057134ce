"""Where each process of a run goes: a pure function of the recipe and of the nodes.

A slot is what one trainer rank takes: a GPU, or a core of a cluster without GPUs.

1. Trainer ranks fill one node after the other, in the order of ranks. Where the nodes allow it, no tensor-parallel
   and no expert-parallel group is cut by the end of a node.
2. Engines that share devices with the trainer (`rollout.colocated`, or resync over `ipc`) go onto its ranks' slots,
   and where these do not suffice onto free ones beside them. Other engines go onto slots that no rank has.
3. An engine's slots are on one node.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from slimrl.config.devices import shares_devices
from slimrl.config.rollout_rules import ONE_NODE_ENGINES
from slimrl.config.schema import Recipe
from slimrl.runtime.errors import StageError


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node as the cluster knows it."""

    node_id: str
    name: str
    """For people, and for the planner of a resync; no other node of the cluster has it."""
    address: str
    """At which the run's other processes reach servers on it."""
    slots: int


@dataclass(frozen=True, kw_only=True)
class Slot:
    node: Node
    number: int
    """Within the node, from 0"""


@dataclass(frozen=True, kw_only=True)
class Placement:
    ranks: tuple[Slot, ...]
    """Of each trainer rank"""
    engines: tuple[tuple[Slot, ...], ...]
    """Of each engine"""

    @property
    def slots(self) -> tuple[Slot, ...]:
        """All that the run takes, each once."""
        return tuple(self._num_processes)

    def num_processes(self, slot: Slot) -> int:
        """Trainer ranks and engines on it."""
        return self._num_processes[slot]

    @cached_property
    def _num_processes(self) -> Counter[Slot]:
        return Counter((*self.ranks, *(slot for slots in self.engines for slot in slots)))


def most_slots(recipe: Recipe, *, num_ranks: int, num_engines: int) -> int:
    """As many as the run could use if it shared none."""
    return num_ranks + num_engines * recipe.rollout.engine_tensor


def place(recipe: Recipe, nodes: Sequence[Node], *, num_ranks: int, num_engines: int, unit: str = "slots") -> Placement:
    """
    Args:
        nodes: in the order in which they are filled.
        num_ranks: trainer ranks of this command; 0 where it has none.
        num_engines: engines of this command.
        unit: what a slot is, for errors: "GPUs" or "cores".

    Raises:
        StageError: the nodes are too few or too small; it says what is there and what is needed.
    """
    shared = num_ranks > 0 and shares_devices(recipe)
    ranks = _place_ranks(recipe, nodes, num_ranks)
    engines = None if ranks is None else _place_engines(recipe, nodes, ranks, num_engines, shared=shared)
    if ranks is None or engines is None:
        raise StageError(_refusal(recipe, nodes, num_ranks, num_engines, shared=shared, unit=unit))
    return Placement(ranks=ranks, engines=engines)


def place_on_fewest(recipe: Recipe, slots_per_node: int, *, num_ranks: int, num_engines: int) -> tuple[Placement, int]:
    """Where a run goes on a cluster of as few alike nodes as are enough, and how many nodes these are.

    Raises:
        ValueError: no number of such nodes is enough.
    """
    shared = num_ranks > 0 and shares_devices(recipe)
    taken = num_ranks if shared else most_slots(recipe, num_ranks=num_ranks, num_engines=num_engines)
    fewest = -(-taken // slots_per_node)
    # More nodes than processes are of no use.
    for count in range(max(1, fewest), num_ranks + num_engines + 1):
        names = (f"node{index}" for index in range(count))
        nodes = [Node(node_id=name, name=name, address=name, slots=slots_per_node) for name in names]
        try:
            return place(recipe, nodes, num_ranks=num_ranks, num_engines=num_engines), count
        except StageError:
            continue
    size = recipe.rollout.engine_tensor
    if size > slots_per_node or not shared:
        reason = f"rollout.engine_tensor = {size}, and each engine is on one node. {ONE_NODE_ENGINES}"
    else:
        reason = (
            f"rollout.num_engines = {num_engines} with rollout.engine_tensor = {size} do not fit on those that have "
            f"the {num_ranks} trainer ranks, whose GPUs they share."
        )
    raise ValueError(f"no number of nodes with {slots_per_node} GPUs is enough: {reason}")


def _place_ranks(recipe: Recipe, nodes: Sequence[Node], num_ranks: int) -> tuple[Slot, ...] | None:
    """The first that fits: whole tensor- and expert-parallel groups on a node, whole tensor-parallel ones, any."""
    parallel = recipe.trainer.parallel
    groups = math.lcm(parallel.tensor, parallel.expert * parallel.expert_tensor)
    for block in (groups, parallel.tensor, 1):
        slots: list[Slot] = []
        for node in nodes:
            count = min(num_ranks - len(slots), node.slots // block * block)
            slots += [Slot(node=node, number=number) for number in range(count)]
        if len(slots) == num_ranks:
            return tuple(slots)
    return None


def _place_engines(
    recipe: Recipe, nodes: Sequence[Node], ranks: Sequence[Slot], num_engines: int, *, shared: bool
) -> tuple[tuple[Slot, ...], ...] | None:
    size = recipe.rollout.engine_tensor
    taken = set(ranks)
    slots_of = {node: [Slot(node=node, number=number) for number in range(node.slots)] for node in nodes}
    with_ranks = {node: [slot for slot in slots if slot in taken] for node, slots in slots_of.items()}
    without = {node: [slot for slot in slots if slot not in taken] for node, slots in slots_of.items()}
    trainer_nodes = {slot.node for slot in ranks}
    engines: list[tuple[Slot, ...]] = []

    def take(slots: list[Slot]) -> None:
        """As many engines as these slots of one node still hold."""
        while len(engines) < num_engines and len(slots) >= size:
            engines.append(tuple(slots[:size]))
            del slots[:size]

    if shared:
        for slots in with_ranks.values():
            take(slots)
        for node, slots in with_ranks.items():
            if node in trainer_nodes:
                take(slots + without[node])
    else:
        for slots in without.values():
            take(slots)
    return tuple(engines) if len(engines) == num_engines else None


def _refusal(
    recipe: Recipe, nodes: Sequence[Node], num_ranks: int, num_engines: int, *, shared: bool, unit: str
) -> str:
    size = recipe.rollout.engine_tensor
    needed = []
    if num_ranks:
        needed.append(f"{num_ranks} {unit} for trainer ranks")
    if num_engines:
        where = " on the trainer's nodes, on the same ones as its ranks" if shared else ""
        others = " others" if num_ranks and not shared else f" {unit}"
        needed.append(f"{num_engines} x {size}{others} for engines{where}, each engine on one node")
    there = ", ".join(f"{node.name} {node.slots}" for node in nodes) or "no node"
    too_large = num_engines and size > max((node.slots for node in nodes), default=size)
    instead = f". {ONE_NODE_ENGINES}" if too_large else ""
    return f"the cluster is too small: the run needs {' and '.join(needed)}; there are {unit} on: {there}{instead}"
