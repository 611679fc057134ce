"""Placement of a run's processes on nodes: a pure function of the recipe and the nodes.

A slot is the room of one trainer rank: a GPU, or a core of a cluster without GPUs.

1. Trainer ranks fill one node after the other, in the order of ranks. If the nodes allow it, tensor-parallel and
   expert-parallel groups stay within a node.
2. Engines that share devices with the trainer (`rollout.colocated`, or resync over `ipc`) use its ranks' slots, and if
   these do not suffice, free ones of the same nodes. Other engines use slots without a rank.
3. An engine's slots are on one node, or in equal parts on `rollout.engine_nodes` nodes.
4. Engines of a teacher come next, on slots that have neither a rank nor an engine, and then those of older versions of
   the policy.
5. Ranks of a critic come last, on slots that have nothing else, in the way of the trainer's ranks.
"""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from slimrl.base.errors import StageError
from slimrl.config.critic import critic_recipe
from slimrl.config.past_versions import past_recipe
from slimrl.config.rollout_rules import LARGER_ENGINES
from slimrl.config.schema.recipe import Recipe
from slimrl.config.teacher import teacher_recipe
from slimrl.observability.units import counted


@dataclass(frozen=True, kw_only=True)
class Node:
    node_id: str
    name: str
    """Name of the node, unique in the cluster; for messages and for the planner of a resync"""
    address: str
    """Address at which other processes of the run reach servers on this node"""
    slots: int


@dataclass(frozen=True, kw_only=True)
class Slot:
    node: Node
    number: int
    """Number of the slot within its node, from 0"""


@dataclass(frozen=True, kw_only=True)
class Placement:
    ranks: tuple[Slot, ...]
    """Slot of each trainer rank"""
    engines: tuple[tuple[Slot, ...], ...]
    """Slots of each engine, node by node"""
    teachers: tuple[tuple[Slot, ...], ...] = ()
    """Slots of each of the teacher's engines, node by node"""
    past: tuple[tuple[Slot, ...], ...] = ()
    """Slots of each engine of older versions of the policy, node by node"""
    critics: tuple[Slot, ...] = ()
    """Slot of each of the critic's ranks"""

    @property
    def slots(self) -> tuple[Slot, ...]:
        """All slots of the run, each once."""
        return tuple(self.num_processes)

    @cached_property
    def num_processes(self) -> Counter[Slot]:
        """Number of ranks and engines on each slot of the run."""
        of_engines = (slot for slots in (*self.engines, *self.teachers, *self.past) for slot in slots)
        return Counter((*self.ranks, *of_engines, *self.critics))


def most_slots(
    recipe: Recipe,
    *,
    num_ranks: int,
    num_engines: int,
    num_teachers: int = 0,
    num_past: int = 0,
    num_critics: int = 0,
) -> int:
    """Slots of the run if trainer and engines share none."""
    of_engines = (num_engines + num_past) * recipe.rollout.engine_tp + num_teachers * recipe.teacher.engine_tp
    return num_ranks + of_engines + num_critics


def place(
    recipe: Recipe,
    nodes: Sequence[Node],
    *,
    num_ranks: int,
    num_engines: int,
    num_teachers: int = 0,
    num_past: int = 0,
    num_critics: int = 0,
    unit: str = "slots",
) -> Placement:
    """
    Args:
        num_past: engines of older versions of the policy.
        num_critics: ranks of the critic.
        nodes: in the order in which they are filled.
        unit: kind of slot, for errors: "GPUs" or "cores".

    Raises:
        StageError: the nodes are too few or too small; the message says what is there and what is needed.
    """
    shared = num_ranks > 0 and recipe.shares_devices
    ranks = _place_ranks(recipe, nodes, num_ranks)
    engines = None if ranks is None else _place_engines(recipe, nodes, ranks, num_engines, shared=shared)
    if ranks is None or engines is None:
        if shared and ranks is not None and (message := _too_few_nodes(recipe, ranks, unit)):
            raise StageError(message)
        raise StageError(_refusal(recipe, nodes, num_ranks, num_engines, shared=shared, unit=unit))
    placement = Placement(ranks=ranks, engines=engines)
    if num_teachers:
        teachers = _place_engines(teacher_recipe(recipe), nodes, placement.slots, num_teachers, shared=False)
        if teachers is None:
            tp, spread = recipe.teacher.engine_tp, counted(recipe.teacher.engine_nodes, "node")
            needed = f"the teacher needs {num_teachers} x {tp} {unit} of its own, each engine on {spread}"
            raise StageError(_no_room(needed, nodes, placement, unit))
        placement = replace(placement, teachers=teachers)
    if num_past:
        past = _place_engines(past_recipe(recipe), nodes, placement.slots, num_past, shared=False)
        if past is None:
            tp, spread = recipe.rollout.engine_tp, counted(recipe.rollout.engine_nodes, "node")
            needed = f"older versions of the policy (agent.past_versions) need {num_past} x {tp} {unit} of their own"
            raise StageError(_no_room(f"{needed}, each engine on {spread}", nodes, placement, unit))
        placement = replace(placement, past=past)
    if num_critics:
        critics = _place_ranks(critic_recipe(recipe), nodes, num_critics, taken=placement.slots)
        if critics is None:
            raise StageError(_no_room(f"the critic needs {num_critics} {unit} of its own", nodes, placement, unit))
        placement = replace(placement, critics=critics)
    return placement


def place_what_fits(recipe: Recipe, nodes: Sequence[Node], *, num_engines: int, **others: Any) -> Placement:
    """`place` with as many engines as there is room for, if `rollout.min_engines` are enough."""
    fewest = min(num_engines, recipe.rollout.min_engines or num_engines)
    for count in range(num_engines, fewest, -1):
        with suppress(StageError):
            return place(recipe, nodes, num_engines=count, **others)
    return place(recipe, nodes, num_engines=fewest, **others)


def place_on_fewest(
    recipe: Recipe,
    slots_per_node: int,
    *,
    num_ranks: int,
    num_engines: int,
    num_teachers: int = 0,
    num_past: int = 0,
    num_critics: int = 0,
) -> tuple[Placement, int]:
    """The placement on the fewest equal nodes that suffice, and their number.

    Raises:
        ValueError: no number of such nodes suffices.
    """
    shared = num_ranks > 0 and recipe.shares_devices
    of_others = num_teachers * recipe.teacher.engine_tp + num_past * recipe.rollout.engine_tp
    of_engines = 0 if shared else num_engines * recipe.rollout.engine_tp
    fewest = -(-(num_ranks + of_engines + of_others + num_critics) // slots_per_node)
    # More nodes than processes do not help.
    most = num_ranks + (num_engines + num_past) * recipe.rollout.engine_nodes
    most += num_teachers * recipe.teacher.engine_nodes
    most += num_critics
    for count in range(max(1, fewest), most + 1):
        names = (f"node{index}" for index in range(count))
        nodes = [Node(node_id=name, name=name, address=name, slots=slots_per_node) for name in names]
        try:
            placement = place(
                recipe,
                nodes,
                num_ranks=num_ranks,
                num_engines=num_engines,
                num_teachers=num_teachers,
                num_past=num_past,
                num_critics=num_critics,
            )
            return placement, count
        except StageError:
            continue
    if num_teachers and (tp := recipe.teacher.engine_tp) > slots_per_node * recipe.teacher.engine_nodes:
        raise ValueError(
            f"no number of nodes with {slots_per_node} GPUs is enough: teacher.engine_tp = {tp}, and each engine is on "
            f"{counted(recipe.teacher.engine_nodes, 'node')}. Raise teacher.engine_nodes."
        )
    size, parts = recipe.rollout.engine_tp, recipe.rollout.engine_nodes
    if size // parts > slots_per_node or not shared:
        where = f"each engine is on {parts} nodes" if parts > 1 else "each engine is on one node"
        reason = f"rollout.engine_tp = {size}, and {where}. {LARGER_ENGINES}"
    else:
        reason = (
            f"rollout.num_engines = {num_engines} with rollout.engine_tp = {size} do not fit on those that have "
            f"the {num_ranks} trainer ranks, whose GPUs they share."
        )
    raise ValueError(f"no number of nodes with {slots_per_node} GPUs is enough: {reason}")


def _place_ranks(
    recipe: Recipe, nodes: Sequence[Node], num_ranks: int, *, taken: Collection[Slot] = ()
) -> tuple[Slot, ...] | None:
    """The first that fits: tensor- and expert-parallel groups within nodes, only tensor-parallel ones, any slots."""
    parallel = recipe.trainer.parallel
    groups = math.lcm(parallel.tensor, parallel.expert * parallel.expert_tensor)
    of_nodes = [[Slot(node=node, number=number) for number in range(node.slots)] for node in nodes]
    free = [[slot for slot in slots if slot not in taken] for slots in of_nodes]
    for block in (groups, parallel.tensor, 1):
        slots: list[Slot] = []
        for of_node in free:
            slots += of_node[: min(num_ranks - len(slots), len(of_node) // block * block)]
        if len(slots) == num_ranks:
            return tuple(slots)
    return None


def _place_engines(
    recipe: Recipe, nodes: Sequence[Node], ranks: Sequence[Slot], num_engines: int, *, shared: bool
) -> tuple[tuple[Slot, ...], ...] | None:
    parts = recipe.rollout.engine_nodes
    size = recipe.rollout.engine_tp // parts
    taken = set(ranks)
    slots_of = {node: [Slot(node=node, number=number) for number in range(node.slots)] for node in nodes}
    with_ranks = {node: [slot for slot in slots if slot in taken] for node, slots in slots_of.items()}
    without = {node: [slot for slot in slots if slot not in taken] for node, slots in slots_of.items()}
    trainer_nodes = {slot.node for slot in ranks}
    engines: list[tuple[Slot, ...]] = []

    def take(free: list[list[Slot]]) -> None:
        """Place as many engines as fit on these slots, a list for each node."""
        while len(engines) < num_engines:
            roomy = [slots for slots in free if len(slots) >= size][:parts]
            if len(roomy) < parts:
                return
            engines.append(tuple(slot for slots in roomy for slot in slots[:size]))
            for slots in roomy:
                del slots[:size]

    if shared:
        take(list(with_ranks.values()))
        take([slots + without[node] for node, slots in with_ranks.items() if node in trainer_nodes])
    else:
        take(list(without.values()))
    return tuple(engines) if len(engines) == num_engines else None


def _too_few_nodes(recipe: Recipe, ranks: Sequence[Slot], unit: str) -> str | None:
    """Why engines that share the trainer's slots have too few nodes, however large; None if they have enough."""
    names, parts = list(dict.fromkeys(slot.node.name for slot in ranks)), recipe.rollout.engine_nodes
    if len(names) >= parts:
        return None
    return (
        f"rollout.engine_nodes = {parts}, but the trainer, whose {unit} the engines share, fills only "
        f"{', '.join(names)}. Use rollout.engine_nodes {len(names)}, or more trainer ranks."
    )


def _refusal(
    recipe: Recipe, nodes: Sequence[Node], num_ranks: int, num_engines: int, *, shared: bool, unit: str
) -> str:
    size, parts = recipe.rollout.engine_tp, recipe.rollout.engine_nodes
    needed = []
    if num_ranks:
        needed.append(f"{num_ranks} {unit} for trainer ranks")
    if num_engines:
        where = " on the trainer's nodes, on the same ones as its ranks" if shared else ""
        spread = "one node" if parts == 1 else f"{parts} nodes"
        others = " others" if num_ranks and not shared else f" {unit}"
        needed.append(f"{num_engines} x {size}{others} for engines{where}, each engine on {spread}")
    there = ", ".join(f"{node.name} {node.slots}" for node in nodes) or "no node"
    too_large = num_engines and size // parts > max((node.slots for node in nodes), default=size)
    instead = f". {LARGER_ENGINES}" if too_large else ""
    return f"the cluster is too small: the run needs {' and '.join(needed)}; there are {unit} on: {there}{instead}"


def _no_room(needed: str, nodes: Sequence[Node], placement: Placement, unit: str) -> str:
    taken = Counter(slot.node for slot in placement.slots)
    free = ", ".join(f"{node.name} {node.slots - taken[node]}" for node in nodes)
    return f"the cluster is too small: {needed}; free beside the run's other processes are {unit} on: {free}"
