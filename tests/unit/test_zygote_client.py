"""The host's end of the warm interpreter, with a peer that answers as the test has it, and starts no process."""

import asyncio
import fcntl
import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from slimrl.agent.sandbox import zygote_client
from slimrl.agent.sandbox.inside.zygote import Zygote, _Run
from slimrl.agent.sandbox.interface import SandboxError
from slimrl.agent.sandbox.zygote_client import Run, ZygoteClient, memory_file
from slimrl.config.schema.agent import SandboxLimits


class Peer:
    """Takes runs and kills; a run ends with its kill, unless its number is among the `endless`."""

    def __init__(self, client: ZygoteClient, *, answers: bool, endless: set[int]) -> None:
        self.client, self.answers, self.endless = client, answers, endless
        client._theirs.setblocking(False)
        asyncio.get_running_loop().add_reader(client._control, client._receive)
        asyncio.get_running_loop().add_reader(client._theirs, self.receive)

    def receive(self) -> None:
        request = json.loads(self.client._theirs.recv(4096))
        number = request.get("kill")
        if number is None or not self.answers:
            return
        self.say({"killed": number})
        if number not in self.endless:
            self.say({"id": number, "status": -9, "cpu_s": 0.0, "over_memory": False})

    def say(self, message: dict) -> None:
        self.client._theirs.send(json.dumps(message).encode())


def spawn(client: ZygoteClient) -> Run:
    with open(os.devnull, "rb") as nothing:
        return client.spawn({"language": "python", "code": ""}, SandboxLimits(), stdin=nothing.fileno())


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(zygote_client, "END_S", 0.2)


async def test_a_run_that_cannot_be_ended_is_given_up_and_others_go_on():
    client = ZygoteClient([], Path())
    peer = Peer(client, answers=True, endless={1})
    first, second = spawn(client), spawn(client)
    with pytest.raises(SandboxError, match="given up; others go on"):
        await first.end()
    assert not client.broken
    assert await second.end() == ("", "")
    assert second.exited.result().status == -9
    peer.say({"id": 1, "status": -9, "cpu_s": 0.0, "over_memory": False})  # in the end it does
    third = spawn(client)
    assert await third.end() == ("", "")
    await client.close()


async def test_a_sandbox_that_does_not_answer_is_ended():
    client = ZygoteClient([], Path())
    Peer(client, answers=False, endless=set())
    first, second = spawn(client), spawn(client)
    with pytest.raises(SandboxError, match="did not answer within"):
        await first.end()
    assert client.broken
    assert isinstance(second.exited.exception(), SandboxError)
    second.output.close()


class Unreadable:
    """A run's processes, of which nothing can be read."""

    killed = False

    def open(self) -> bool:
        raise ValueError("no number")

    def kill(self) -> None:
        self.killed = True


class Quiet(Unreadable):
    def open(self) -> bool:
        return False


def test_a_run_that_cannot_be_looked_at_fails_alone():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    unreadable, quiet, watched = Unreadable(), Quiet(), Zygote.__new__(Zygote)
    watched._control = theirs
    watched._runs = {
        number: _Run(number, 1000, processes, SimpleNamespace(next_look_s=0.1), next_look=0.0)
        for number, processes in ((1, unreadable), (2, quiet))
    }
    watched._look()
    report = json.loads(ours.recv(4096))
    assert report["id"] == 1
    assert "ValueError('no number')" in report["problem"]
    assert (unreadable.killed, quiet.killed) == (True, False)
    assert watched._runs[2].next_look > 0
    ours.close()
    theirs.close()


def test_a_memory_file_can_be_read_and_never_changed():
    file = memory_file(b"abc")
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    assert fcntl.fcntl(file, fcntl.F_GET_SEALS) == seals
    assert os.read(file, 10) == b"abc"
    for change in (lambda: os.pwrite(file, b"x", 0), lambda: os.ftruncate(file, 10), lambda: os.ftruncate(file, 0)):
        with pytest.raises(PermissionError):
            change()
    os.close(file)
