"""The part of a Ray cluster that a run reserves: a placement group with one bundle for each slot.

Bundles name their nodes, so Ray follows the decision of `placement.place`. Processes that share a slot each ask for a
fraction of its bundle.
"""

import logging
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slimrl.base.errors import StageError
from slimrl.runtime.cluster.placement import Node, Placement, Slot

RESERVE_TIMEOUT_S = 60.0
"""How long to wait for slots that another run uses."""
PROBE_TIMEOUT_S = 5.0
"""How long a node's Ray may take to accept a connection."""
LOCALHOST = "127.0.0.1"

_NODE_ID_LABEL = "ray.io/node-id"

log = logging.getLogger(__name__)


def cluster_nodes(*, private: bool) -> tuple[list[Node], str]:
    """The living nodes, the driver's first, and the resource of their slots: "GPU" if any node has one, else "CPU".

    Args:
        private: the cluster is the run's own on this machine, where servers are reached over localhost.
    """
    mine = ray.get_runtime_context().get_node_id()
    alive = [node for node in ray.nodes() if node["Alive"]]
    alive.sort(key=lambda node: (node["NodeID"] != mine, node["NodeManagerHostname"], node["NodeID"]))
    resource = "GPU" if any(node["Resources"].get("GPU", 0) >= 1 for node in alive) else "CPU"
    hosts = [node["NodeManagerHostname"] for node in alive]
    nodes = [
        Node(
            node_id=node["NodeID"],
            # Several nodes of one machine share its host name.
            name=host if hosts.count(host) == 1 else f"{host}/{node['NodeID'][:8]}",
            address=LOCALHOST if private else node["NodeManagerAddress"],
            slots=int(node["Resources"].get(resource, 0)),
        )
        for host, node in zip(hosts, alive, strict=True)
    ]
    return nodes, resource


def is_alive(node: Node) -> bool:
    """Whether the cluster still lists this node, and Ray listens there.

    The cluster takes 15 s to notice a node that died silently, but its processes end at once.
    """
    for other in ray.nodes():
        if other["NodeID"] == node.node_id and other["Alive"]:
            address = (other["NodeManagerAddress"], other["NodeManagerPort"])
            with suppress(OSError), socket.create_connection(address, timeout=PROBE_TIMEOUT_S):
                return True
    return False


class Reservation:
    """Holds the slots of a placement until the driver leaves the cluster."""

    def __init__(self, placement: Placement, resource: str, group: PlacementGroup | None = None) -> None:
        """
        Args:
            group: that has these slots already.

        Raises:
            StageError: the slots are not free.
        """
        self.placement, self.resource = placement, resource
        self._bundles = {slot: index for index, slot in enumerate(placement.slots)}
        self._group = group or placement_group(
            [{resource: 1} for _ in self._bundles],
            bundle_label_selector=[{_NODE_ID_LABEL: slot.node.node_id} for slot in self._bundles],
        )
        if not self._group.wait(RESERVE_TIMEOUT_S):
            free = ray.available_resources().get(resource, 0)
            raise StageError(
                f"the cluster is in use: the run needs {len(self._bundles)} {resource}s, "
                f"and {free:g} were free for {RESERVE_TIMEOUT_S:.0f} s"
            )
        for slot, index in self._bundles.items():
            log.info("slot %d: %s %d", index, slot.node.name, slot.number)
        self._devices = self._find_devices()

    def options(self, slot: Slot, variables: Mapping[str, str]) -> dict[str, Any]:
        """Ray options of an actor whose first or only slot this is, with variables that its process has from its start.

        Ray writes the variables into its logs.
        """
        # Ray refuses fractions finer than 1/10000.
        fraction = int(1000 / self.placement.num_processes[slot]) / 1000
        return {
            "num_cpus": fraction if self.resource == "CPU" else 0,
            "num_gpus": fraction if self.resource == "GPU" else 0,
            "scheduling_strategy": self._strategy(slot),
            "runtime_env": {"env_vars": dict(variables)},
        }

    def give_back(self) -> None:
        """Give the slots back to the cluster, now."""
        remove_placement_group(self._group)

    def devices(self, slots: tuple[Slot, ...]) -> tuple[str, ...]:
        """GPU ids of these slots; empty without GPUs, or for a single slot, whose GPU Ray makes visible itself."""
        return tuple(self._devices[slot] for slot in slots if slot in self._devices)

    def _find_devices(self) -> dict[Slot, str]:
        """GPU ids by slot, for engines with several GPUs: their process is in one bundle, and sees only its GPU."""
        engines = (*self.placement.engines, *self.placement.teachers, *self.placement.past)
        several = {slot for slots in engines if len(slots) > 1 for slot in slots}
        if self.resource != "GPU" or not several:
            return {}
        asked = {
            slot: _gpu_id.options(num_cpus=0, num_gpus=1, scheduling_strategy=self._strategy(slot)).remote()
            for slot in self._bundles
            if slot in several
        }
        try:
            return dict(zip(asked, ray.get(list(asked.values()), timeout=RESERVE_TIMEOUT_S), strict=True))
        except ray.exceptions.RayError as error:
            raise StageError(
                f"cannot find out the GPU ids of the engines: {type(error).__name__}", str(error)
            ) from error

    def _strategy(self, slot: Slot) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=self._bundles[slot])


class Room:
    """Slots on a node for one engine more, which the cluster gives as soon as it has them."""

    def __init__(self, num_slots: int, resource: str) -> None:
        self._num_slots, self._resource = num_slots, resource
        self._group = placement_group([{resource: 1}] * num_slots, strategy="STRICT_PACK")

    def find(self) -> Reservation | None:
        """The reservation of the slots; None until the cluster has them."""
        table = placement_group_table(self._group)
        if table["state"] != "CREATED":
            return None
        node_id = table["bundles_to_node_id"][0]
        nodes, _ = cluster_nodes(private=False)
        node = next((node for node in nodes if node.node_id == node_id), None)
        if node is None:
            return None
        slots = tuple(Slot(node=node, number=number) for number in range(self._num_slots))
        return Reservation(Placement(ranks=(), engines=(slots,)), self._resource, self._group)


@ray.remote(max_retries=0)
def _gpu_id() -> str:
    (gpu,) = ray.get_gpu_ids()
    return str(gpu)
