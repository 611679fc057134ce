"""Nodes that a run keeps free until a node with trainer ranks is lost (`trainer.spare_nodes`).

They are the last nodes of the cluster, reserved whole from the start, so that neither an engine that joins, nor another
run takes room there.
"""

import logging
from collections import Counter
from collections.abc import Sequence

from slimrl.base.errors import StageError
from slimrl.config.restart_rules import SPARES, unused_spares
from slimrl.observability.units import counted
from slimrl.runtime.cluster.placement import Node, Placement, Slot
from slimrl.runtime.cluster.reservation import Reservation, is_alive

log = logging.getLogger(__name__)


def split_spares(nodes: Sequence[Node], num_spares: int) -> tuple[list[Node], list[Node]]:
    """The nodes that a run is placed on, and the last ones with slots, which it keeps free.

    Raises:
        StageError: none is left for the run.
    """
    usable = [node for node in nodes if node.slots]
    if num_spares and num_spares >= len(usable):
        raise StageError(
            f"{SPARES} = {num_spares} leaves none of {counted(len(usable), 'node')} to the run. Give it more, or use 0."
        )
    spares = usable[len(usable) - num_spares :]
    return [node for node in nodes if node not in spares], spares


def check_spares(spares: Sequence[Node], placement: Placement, unit: str, driver: str) -> None:
    """
    Args:
        driver: id of the driver's node.

    Raises:
        StageError: a spare node has fewer slots than ranks may have to move to it, or none ever would.
    """
    ranks = Counter(slot.node for slot in (*placement.ranks, *placement.critics))
    if reason := unused_spares(len(spares), [node.node_id for node in ranks], driver):
        raise StageError(f"{SPARES}: {reason}")
    most = max(ranks.values(), default=0)
    for node in spares:
        if node.slots < most:
            raise StageError(f"{SPARES}: {node.name} has {node.slots} {unit}, and {most} ranks share a node of the run")


class SpareNodes:
    """Slots of the spare nodes, which are taken once."""

    def __init__(self, nodes: Sequence[Node], resource: str) -> None:
        """Raises StageError: another run uses them."""
        self.nodes = list(nodes)
        self._free: list[tuple[list[Slot], Reservation]] = []
        for node in nodes:
            slots = tuple(Slot(node=node, number=number) for number in range(node.slots))
            self._free.append((list(slots), Reservation(Placement(ranks=slots, engines=()), resource)))
            log.info("%s is kept free", node.name)

    def take(self, num_slots: int) -> tuple[list[Slot], Reservation] | None:
        """Slots on one node that lives, and their reservation; None if no node has so many."""
        for slots, places in self._free:
            if len(slots) >= num_slots and is_alive(slots[0].node):
                taken, slots[:num_slots] = slots[:num_slots], []
                return taken, places
        return None
