"""Before a start on a cluster: whether its nodes have room for checkpoints in memory."""

import pytest

from slimrl.base.errors import StageError
from slimrl.config.schema.recipe import Recipe
from slimrl.runtime.checks import shared_memory_check
from slimrl.runtime.checks.shared_memory_check import check_shared_memory
from slimrl.runtime.cluster.placement import Node, Placement, Slot

GIB = 1024**3
NODES = [Node(node_id=name, name=name, address=name, slots=2) for name in "abc"]


def on(*nodes: Node) -> tuple[Slot, ...]:
    return tuple(Slot(node=node, number=number) for number, node in enumerate(nodes))


@pytest.fixture
def free(monkeypatch) -> dict[str, int]:
    """GiB of the nodes, of which the driver is on a; a checkpoint takes 1 GiB."""
    found = {"a": 2, "b": 2, "c": 2}
    monkeypatch.setattr(
        shared_memory_check, "copies_bytes", lambda recipe, count, with_critic: (2 if count == 1 else 4) * GIB
    )
    monkeypatch.setattr(shared_memory_check, "own_node", lambda: NODES[0])
    monkeypatch.setattr(shared_memory_check, "_asked", lambda node: found[node.name] * GIB)
    monkeypatch.setattr(shared_memory_check.ray, "get", lambda asked, timeout: asked)
    return found


def test_nodes_with_ranks_have_the_room_together(free: dict[str, int]):
    both = Placement(ranks=on(NODES[0], NODES[0]), engines=(on(NODES[2]),), critics=on(NODES[1]))
    check_shared_memory(Recipe(), both, [])
    free["b"] = 1
    with pytest.raises(
        StageError, match=r"take at least 4.0 GiB of /dev/shm, and there are 2.0 GiB on a, 1.0 GiB on b"
    ):
        check_shared_memory(Recipe(), both, [])
    check_shared_memory(Recipe(), Placement(ranks=on(NODES[0]), engines=()), [])
    check_shared_memory(Recipe(), Placement(ranks=(), engines=(on(NODES[2]),)), [])


def test_a_spare_node_has_room_for_what_the_ranks_of_a_node_write(free: dict[str, int]):
    both = Placement(ranks=on(NODES[0], NODES[1]), engines=())
    free["c"] = 1
    check_shared_memory(Recipe(), both, NODES[2:])
    free["c"] = 0
    with pytest.raises(StageError, match=r"take at least 1.0 GiB of /dev/shm, and there are 0.0 GiB on c free"):
        check_shared_memory(Recipe(), both, NODES[2:])
    check_shared_memory(Recipe(), both, [])


def test_the_drivers_node_has_room_for_the_copies_of_others(free: dict[str, int]):
    there = Placement(ranks=on(NODES[1]), engines=())
    check_shared_memory(Recipe(), there, [])
    free["a"] = 1
    with pytest.raises(StageError, match=r"take at least 2.0 GiB of /dev/shm, and there are 1.0 GiB on a free"):
        check_shared_memory(Recipe(), there, [])
    # What it has more is of no use to the ranks.
    free.update(a=9, b=1)
    with pytest.raises(StageError, match=r"take at least 2.0 GiB of /dev/shm, and there are 1.0 GiB on b free"):
        check_shared_memory(Recipe(), there, [])
