"""ZeroMQ sockets of an engine's processes: who has the engine's key is heard, and nobody else."""

from contextlib import ExitStack

import pytest
import zmq

from slimrl.engines.plugin import socket_keys

HEARD_MS, UNHEARD_MS = 10_000, 700


@pytest.fixture
def sockets():
    """A function that makes sockets, which are closed at the end."""
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())

        def make(kind):
            made = stack.enter_context(context.socket(kind))
            made.linger = 0
            return made

        yield make


def listening(sockets, monkeypatch, address="tcp://127.0.0.1:*"):
    """(a socket that listens as an engine with the key "right" has it, its address)"""
    monkeypatch.setattr(socket_keys, "_engine_key", lambda: "right")
    listener = sockets(zmq.PULL)
    socket_keys.before_bind(listener, address)
    listener.bind(address)
    return listener, listener.getsockopt_string(zmq.LAST_ENDPOINT)


def test_processes_of_an_engine_hear_each_other(sockets, monkeypatch):
    listener, address = listening(sockets, monkeypatch)
    sender = sockets(zmq.PUSH)
    socket_keys.before_connect(sender, address)
    sender.connect(address)
    sender.send(b"from the engine")
    assert listener.poll(HEARD_MS)
    assert listener.recv() == b"from the engine"


@pytest.mark.parametrize("stranger", ["without a key", "with another key"])
def test_a_stranger_is_not_heard(sockets, monkeypatch, stranger):
    listener, address = listening(sockets, monkeypatch)
    sender = sockets(zmq.PUSH)
    if stranger == "with another key":
        monkeypatch.setattr(socket_keys, "_engine_key", lambda: "wrong")
        socket_keys.before_connect(sender, address)
    sender.connect(address)
    sender.send(b"from a stranger")
    assert not listener.poll(UNHEARD_MS)


def test_sockets_of_the_filesystem_stay_as_they_are(sockets, monkeypatch, tmp_path):
    listener, address = listening(sockets, monkeypatch, f"ipc://{tmp_path}/socket")
    sender = sockets(zmq.PUSH)
    sender.connect(address)
    sender.send(b"plain")
    assert listener.poll(HEARD_MS)
