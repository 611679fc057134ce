"""Whether a node is there: what the cluster says of it, and whether its Ray listens."""

import socket

import pytest

from slimrl.engines.servers.ports import free_ports
from slimrl.runtime.cluster import reservation
from slimrl.runtime.cluster.placement import Node

NODE = Node(node_id="a", name="host-a", address="127.0.0.1", slots=1)


def known_as(monkeypatch: pytest.MonkeyPatch, port: int, *, alive: bool = True, node_id: str = "a") -> None:
    entry = {"NodeID": node_id, "Alive": alive, "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port}
    monkeypatch.setattr(reservation.ray, "nodes", lambda: [entry])


def test_a_node_is_lost_when_its_ray_is_gone_though_the_cluster_has_not_missed_it_yet(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        known_as(monkeypatch, port)
        assert reservation.is_alive(NODE)
        known_as(monkeypatch, port, alive=False)
        assert not reservation.is_alive(NODE)
        known_as(monkeypatch, port, node_id="b")
        assert not reservation.is_alive(NODE)
    (unused,) = free_ports(1)
    known_as(monkeypatch, unused)
    assert not reservation.is_alive(NODE)
