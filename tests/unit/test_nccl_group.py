"""Groups between GPUs: gloo by which their members meet, and a stand-in for NCCL that notes what it is told."""

import os
import queue
import threading
import time
from collections import defaultdict
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from engine_ranks import OnlyRank
from peer_world import Parameter, PeerEngine, World, all_at_once

from slimrl import device
from slimrl.data.model_weights import GroupSpec, TensorSpec
from slimrl.engines.plugin.weight_updates import update
from slimrl.resync.p2p import peer_group
from slimrl.resync.p2p.peer_group import GroupError, Move, PeerGroup

pytestmark = [
    pytest.mark.skipif(device.device_type() == "cuda", reason="NCCL and its streams are stand-ins here"),
    pytest.mark.usefixtures("in_process_store"),
]

JOIN_S = 0.3
"""Long enough for a thread to begin what it does not have to wait for."""


class Nccl:
    """ProcessGroupNCCL as far as it is used: messages are a kernel that runs until their other ends have begun it."""

    def __init__(self, keys, member, size, options):
        self.member, self.options, self.aborted = member, options, threading.Event()
        self.handling = os.environ.get(peer_group.ERROR_HANDLING)
        self._moves, self._connected = None, False
        time.sleep(Nccl.making_s)
        Nccl.made.append(self)

    class Options(SimpleNamespace):
        def __init__(self):
            super().__init__(config=SimpleNamespace())

    def allreduce(self, tensors, options):
        """The first call, in which NCCL connects all members."""
        self._connected = True
        return SimpleNamespace(wait=self._connect)

    def _connect(self, limit):
        if Nccl.connecting is not None:
            Nccl.connecting.wait(10)
        if Nccl.refuses:
            raise RuntimeError("NCCL cannot connect")

    def _start_coalescing(self):
        assert self._connected
        assert self._moves is None
        self._moves = []

    def send(self, tensors, peer, tag):
        if self.aborted.is_set():
            raise RuntimeError("NCCL communicator was aborted")
        self._moves.append((tensors[0], peer, True))

    def recv(self, tensors, peer, tag):
        self._moves.append((tensors[0], peer, False))

    def _end_coalescing(self):
        moves, self._moves = self._moves, None
        Nccl.begun.append((self.member, torch.cuda.stream_of_this_thread()))
        for data, peer, sends in moves:
            if sends:
                Nccl.sent[self.member, peer].put(data.clone())
        start = time.monotonic()
        return SimpleNamespace(wait=lambda limit: self._wait(moves, start + limit.total_seconds()))

    def _wait(self, moves, deadline):
        for data, peer, sends in moves:
            if not sends:
                data.copy_(self._get(Nccl.sent[peer, self.member], deadline))
                Nccl.taken[peer, self.member].put(True)
        for _, peer, sends in moves:
            if sends:
                self._get(Nccl.taken[self.member, peer], deadline)

    def _get(self, box, deadline):
        while True:
            try:
                return box.get(timeout=0.01)
            except queue.Empty:
                if self.aborted.is_set():
                    raise RuntimeError("NCCL communicator was aborted") from None
                if time.monotonic() > deadline:
                    raise RuntimeError("NCCL timed out") from None

    def abort(self):
        self.aborted.set()


class Streams:
    """The part of torch.cuda that deals with streams; a thread is on its default stream, 0, at first."""

    def __init__(self, monkeypatch):
        self._here, self.synchronised = threading.local(), []
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "Stream", self._stream)
        monkeypatch.setattr(torch.cuda, "stream", self._on)
        monkeypatch.setattr(torch.cuda, "stream_of_this_thread", self._current, raising=False)

    def _stream(self):
        stream = SimpleNamespace()
        stream.synchronize = lambda: self.synchronised.append(stream)
        return stream

    def _current(self):
        return getattr(self._here, "stream", 0)

    @contextmanager
    def _on(self, stream):
        self._here.stream = stream
        yield
        self._here.stream = 0


@pytest.fixture(autouse=True)
def streams(monkeypatch):
    Nccl.made, Nccl.begun, Nccl.refuses, Nccl.making_s = [], [], False, 0.0
    Nccl.connecting = None
    Nccl.sent, Nccl.taken = defaultdict(queue.Queue), defaultdict(queue.Queue)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    return Streams(monkeypatch)


SPEC = TensorSpec(name="w", shape=(12, 4), dtype="float32")
PIECES = {SPEC: [(((0, 6), (0, 4)), (0,)), (((6, 12), (0, 4)), (1,))]}


@pytest.fixture
def world():
    engine = PeerEngine(
        [{"w": [Parameter(((6 * (r // 2), 6 * (r // 2) + 6), (0, 4)), torch.float32)]} for r in range(4)]
    )
    world = World(
        PIECES, {"w": torch.randn(12, 4)}, [engine], num_ranks=2, bucket_bytes=64, timeout_s=20.0, backend="nccl"
    )
    yield world
    world.leave()


def test_messages_travel_over_nccl_on_streams_of_the_groups_alone(world, streams):
    for version in (1, 2):
        world.sources[0].truth = world.sources[1].truth = {"w": torch.randn(12, 4)}
        assert all_at_once(world.calls(version)).errors == {}
        assert world.engines[0].wrong(world.sources[0].truth) == []
    by_member = defaultdict(set)
    for member, stream in Nccl.begun:
        by_member[member].add(id(stream))
    assert sorted(by_member) == list(range(6))
    assert all(len(each) == 1 for each in by_member.values())
    assert len(set.union(*by_member.values())) == 6
    assert 0 not in [stream for _, stream in Nccl.begun]
    assert {id(stream) for stream in streams.synchronised} == set.union(*by_member.values())
    assert all(group.options.config.max_ctas == peer_group.MAX_CTAS for group in Nccl.made)


def test_a_receiver_begins_no_kernel_before_a_sender_has_something_for_it(world):
    calls = world.calls(1)
    gates = {sender._rank: threading.Event() for sender in world.senders[0]}
    for rank, values in enumerate(world.values):
        write = values.write
        values.write = lambda *given, rank=rank, write=write: (gates[rank].wait(10), write(*given))
    found = []

    def look():
        time.sleep(JOIN_S)
        found.append(len(Nccl.begun))
        for gate in gates.values():
            gate.set()

    outcome = all_at_once(calls | {"look": look})
    assert outcome.errors == {}
    assert found == [0]
    assert len(Nccl.begun) > 0


def test_a_sender_begins_no_kernel_before_its_receiver_is_ready(world):
    (group,) = world.groups
    calls = {key: call for key, call in world.calls(1, send_s=1.0).items() if key[0] == "trainer"}

    def joins(member):
        joined = PeerGroup(group, member)
        time.sleep(1.5)
        joined.drop()

    outcome = all_at_once(calls | {member: lambda member=member: joins(member) for member in range(4)})
    assert {type(outcome.errors[key]) for key in calls} == {GroupError}
    assert Nccl.begun == []


def pair(timeout_s=30.0):
    spec = GroupSpec(name="two", address="127.0.0.1", port=1, world_size=2, backend="nccl", timeout_s=timeout_s)
    return all_at_once({member: lambda member=member: PeerGroup(spec, member) for member in range(2)}).values


def data():
    return torch.zeros(8, dtype=torch.uint8)


@pytest.mark.parametrize("before", [None, "3"])
def test_torch_may_not_end_the_process_for_this_group_and_may_for_others(monkeypatch, before):
    if before is None:
        monkeypatch.delenv(peer_group.ERROR_HANDLING, raising=False)
    else:
        monkeypatch.setenv(peer_group.ERROR_HANDLING, before)
    PeerGroup(GroupSpec(name="g", address="", port=1, world_size=1, backend="nccl", timeout_s=10.0), 0).drop()
    assert [made.handling for made in Nccl.made] == ["0"]
    assert os.environ.get(peer_group.ERROR_HANDLING) == before


def test_groups_that_threads_make_at_once_leave_the_environment_as_it_was(monkeypatch):
    """Each waits for all to be connecting, as it would for a member that makes them in another order."""
    monkeypatch.delenv(peer_group.ERROR_HANDLING, raising=False)
    Nccl.making_s, Nccl.connecting = 0.05, threading.Barrier(4)

    def make(number):
        PeerGroup(
            GroupSpec(name=f"g{number}", address="", port=1, world_size=1, backend="nccl", timeout_s=10.0), 0
        ).drop()

    assert all_at_once({number: lambda number=number: make(number) for number in range(4)}).errors == {}
    assert [made.handling for made in Nccl.made] == ["0"] * 4
    assert peer_group.ERROR_HANDLING not in os.environ


def test_torch_has_the_functions_of_a_group_without_torchs_own_wrapper():
    """The stand-in's coalescing takes what this class takes; ProcessGroupNCCL inherits the same."""
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
    for call in (group._start_coalescing, group._end_coalescing):
        with pytest.raises(RuntimeError, match="does not implement"):
            call()


def test_a_group_that_nccl_cannot_connect_is_an_error_and_leaves_no_kernel():
    Nccl.refuses = True
    with pytest.raises(GroupError, match="joining group g: NCCL cannot connect"):
        PeerGroup(GroupSpec(name="g", address="", port=1, world_size=1, backend="nccl", timeout_s=10.0), 0)
    assert [made.aborted.is_set() for made in Nccl.made] == [True]


@pytest.mark.parametrize("sends", [True, False])
def test_a_member_that_leaves_aborts_its_own_messages(sends):
    members = pair()

    def leave():
        while not Nccl.begun:
            time.sleep(0.01)
        members[0].drop()

    pending = members[0].start([Move(1, data(), sends)], time.monotonic() + 30)
    outcome = all_at_once({"waits": pending.wait, "leaves": leave})
    assert "NCCL communicator was aborted" in str(outcome.errors["waits"])
    assert outcome.seconds < 5
    assert [made.member for made in Nccl.made if made.aborted.is_set()] == [0]
    members[1].drop()


def test_messages_that_are_late_are_an_error_at_the_deadline():
    members = pair()
    start = time.monotonic()
    pending = members[0].start([Move(1, data(), sends=True)], start + 0.5)
    with pytest.raises(GroupError, match="message to member 1: NCCL timed out"):
        pending.wait()
    assert 0.4 < time.monotonic() - start < 3
    for member in members.values():
        member.drop()


def test_the_deadline_of_a_message_does_not_depend_on_when_its_wait_begins():
    members = pair()
    start = time.monotonic()
    pending = members[0].start([Move(1, data(), sends=True)], start + 1.5)
    time.sleep(1.0)
    members[1].start([Move(0, data(), sends=False)], start + 30)
    taken = threading.Timer(0.2, Nccl.taken[0, 1].put, [True])
    taken.start()
    pending.wait()
    for member in members.values():
        member.drop()


def test_messages_that_cannot_begin_leave_no_launch_open():
    members = pair()
    (nccl,) = [made for made in Nccl.made if made.member == 0]
    nccl.abort()
    with pytest.raises(GroupError, match="aborted"):
        members[0].start([Move(1, data(), sends=True)], time.monotonic() + 30)
    assert nccl._moves is None
    for member in members.values():
        member.drop()


def test_a_rank_that_has_received_waits_for_its_own_stream_alone(monkeypatch):
    """The device as a whole may be receiving the next round."""
    waited = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: waited.append(1)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("waits for the whole device"))
    told = update(SimpleNamespace(), {"slimrl_receive_version": "g", "model": "target", "version": 1}, OnlyRank())
    assert told == (False, "rank 0: GroupError: not in group g")
    assert waited == [1]
