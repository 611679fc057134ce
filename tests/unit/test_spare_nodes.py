"""Nodes that are kept free until a node with ranks is lost."""

import pytest

from slimrl.base.errors import StageError
from slimrl.runtime.cluster import spare_nodes
from slimrl.runtime.cluster.placement import Node, Placement, Slot
from slimrl.runtime.cluster.spare_nodes import SpareNodes, check_spares, split_spares


def node(name: str, slots: int = 4) -> Node:
    return Node(node_id=name, name=name, address=name, slots=slots)


NODES = [node("a"), node("b"), node("c", 2)]


def on(which: Node, count: int) -> tuple[Slot, ...]:
    return tuple(Slot(node=which, number=number) for number in range(count))


def test_the_last_nodes_are_kept_free():
    assert split_spares(NODES, 0) == (NODES, [])
    assert split_spares(NODES, 2) == (NODES[:1], NODES[1:])
    with pytest.raises(StageError, match=r"^trainer.spare_nodes = 3 leaves none of 3 nodes to the run"):
        split_spares(NODES, 3)


def test_a_node_without_slots_is_no_spare_one():
    nodes = [*NODES, node("login", 0)]
    assert split_spares(nodes, 1) == ([*NODES[:2], nodes[3]], [NODES[2]])
    assert split_spares(nodes, 0) == (nodes, [])
    with pytest.raises(StageError, match=r"^trainer.spare_nodes = 3 leaves none of 3 nodes .* or use 0\.$"):
        split_spares(nodes, 3)


def test_a_spare_has_room_for_the_ranks_of_the_fullest_node():
    small = Placement(ranks=on(NODES[0], 2), engines=(on(NODES[1], 4),))
    check_spares(NODES[2:], small, "GPUs", "b")
    check_spares([], Placement(ranks=(), engines=()), "GPUs", "a")
    of_both = Placement(ranks=on(NODES[0], 2), engines=(), critics=on(NODES[0], 4)[2:])
    with pytest.raises(StageError, match=r"^trainer.spare_nodes: c has 2 GPUs, and 4 ranks share a node of the run"):
        check_spares(NODES[2:], of_both, "GPUs", "b")


def test_spares_that_no_rank_would_move_to_are_refused():
    beside = Placement(ranks=on(NODES[0], 2), engines=(on(NODES[1], 4),))
    with pytest.raises(StageError, match=r"^trainer.spare_nodes: 1: all trainer ranks are on the driver's node, "):
        check_spares(NODES[2:], beside, "GPUs", "a")
    # A critic's are started anew too.
    check_spares(NODES[1:2], Placement(ranks=beside.ranks, engines=(), critics=on(NODES[2], 1)), "GPUs", "a")


@pytest.fixture
def lost(monkeypatch) -> set[str]:
    names = set()
    monkeypatch.setattr(spare_nodes, "is_alive", lambda one: one.name not in names)
    monkeypatch.setattr(spare_nodes, "Reservation", lambda placement, resource: (placement, resource))
    return names


def test_slots_are_taken_once_and_not_on_a_lost_node(lost: set[str]):
    spares = SpareNodes(NODES[1:], "GPU")
    slots, (placement, resource) = spares.take(3)
    assert (slots, placement.slots, resource) == ([*on(NODES[1], 3)], on(NODES[1], 4), "GPU")
    # A critic's ranks of the same node, beside them.
    assert spares.take(1)[0] == [Slot(node=NODES[1], number=3)]
    assert spares.take(4) is None
    lost.add("c")
    assert spares.take(2) is None
