"""The group between GPUs: gloo by which its members meet, and a stand-in for NCCL that notes what it is told."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from engine_ranks import OnlyRank

from slimrl import device
from slimrl.data.model_weights import GroupSpec
from slimrl.engines.plugin import bucket_receiver
from slimrl.engines.plugin.bucket_loader import update
from slimrl.engines.plugin.bucket_receiver import EngineReceivers
from slimrl.resync.ipc import broadcast_group
from slimrl.resync.ipc.broadcast_group import BroadcastGroup, GroupError, serve_store

pytestmark = pytest.mark.skipif(device.device_type() == "cuda", reason="NCCL and its streams are stand-ins here")

JOIN_S = 0.3
"""Long enough for a thread to begin what it does not have to wait for."""


class Nccl:
    """ProcessGroupNCCL as far as it is used: a broadcast is a kernel that runs until every member has begun it."""

    Options = SimpleNamespace

    def __init__(self, keys, rank, size, options):
        self.rank, self.size, self.aborted = rank, size, threading.Event()
        self.handling = os.environ.get(broadcast_group.ERROR_HANDLING)
        Nccl.made.append(self)

    def broadcast(self, tensors, options):
        number = 1 + [rank for rank, _ in Nccl.begun].count(self.rank)
        if self.rank == 0:
            Nccl.sent[number] = tensors[0].clone()
        Nccl.begun.append((self.rank, torch.cuda.stream_of_this_thread()))
        return SimpleNamespace(wait=lambda limit: self._wait(tensors[0], number, time.monotonic() + limit.seconds))

    def _wait(self, tensor, number, deadline):
        while min([rank for rank, _ in Nccl.begun].count(rank) for rank in range(self.size)) < number:
            if self.aborted.wait(0.01):
                raise RuntimeError("NCCL communicator was aborted")
            if time.monotonic() > deadline:
                raise RuntimeError("NCCL timed out")
        tensor.copy_(Nccl.sent[number])

    def abort(self):
        self.aborted.set()


class Streams:
    """The part of torch.cuda that deals with streams; a thread is on its default stream, 0, at first."""

    def __init__(self, monkeypatch):
        self._here, self.synchronised = threading.local(), []
        monkeypatch.setattr(torch.cuda, "Stream", lambda: SimpleNamespace(synchronize=lambda: None))
        monkeypatch.setattr(torch.cuda, "stream", self._on)
        monkeypatch.setattr(torch.cuda, "stream_of_this_thread", self._current, raising=False)

    def _current(self):
        return getattr(self._here, "stream", 0)

    @contextmanager
    def _on(self, stream):
        self._here.stream = stream
        yield
        self._here.stream = 0


@pytest.fixture(autouse=True)
def nccl(monkeypatch):
    Nccl.made, Nccl.begun, Nccl.sent = [], [], {}
    Streams(monkeypatch)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    return Nccl


def group_of(num_receivers, timeout_s=10.0):
    store = serve_store("127.0.0.1", num_receivers + 1, timeout_s)
    spec = GroupSpec(
        name="slimrl-nccl", address="127.0.0.1", port=store.port, world_size=num_receivers + 1, backend="nccl",
        bucket_bytes=160, timeout_s=timeout_s,
    )  # fmt: skip
    return spec, store


def send(group, values):
    group.announce(values.nbytes)
    group.broadcast(values.view(torch.uint8))


def test_a_receiver_begins_no_kernel_before_the_sender_does(nccl):
    """One that waited for the next bucket on the device would keep an engine waiting that loads the last one."""
    receivers = EngineReceivers(OnlyRank())
    spec, store = group_of(1)
    receivers.open_version(spec, 1)
    group = BroadcastGroup(spec, 0, store)
    for number in range(4):
        time.sleep(JOIN_S)
        assert len(nccl.begun) == 2 * number
        values = torch.randn(5)
        send(group, values)
        assert torch.equal(receivers.bucket(spec.name, number)[:20].view(torch.float32), values)
    group.announce(0)
    group.drop()
    receivers.close()


def test_nobody_begins_a_kernel_until_all_are_ready_for_it(monkeypatch, nccl):
    def no_memory(nbytes, name, compute_device):
        time.sleep(JOIN_S)
        raise OSError("no space left")

    monkeypatch.setattr(bucket_receiver, "shared_buffer", no_memory)
    receivers = EngineReceivers(OnlyRank())
    spec, store = group_of(1, timeout_s=30.0)
    receivers.open_version(spec, 1)
    group = BroadcastGroup(spec, 0, store)
    start = time.monotonic()
    with pytest.raises(GroupError, match="broadcast: "):
        send(group, torch.randn(5))
    assert time.monotonic() - start < 10
    assert nccl.begun == []
    group.drop()
    receivers.close()


def test_kernels_run_on_a_stream_of_the_group(nccl):
    spec, store = group_of(1)
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(BroadcastGroup, spec, 1)
        members = [BroadcastGroup(spec, 0, store), joined.result(10)]
        received = pool.submit(members[1].broadcast, torch.zeros(3))
        members[0].broadcast(torch.ones(3))
        received.result(10)
    first, second = (stream for _, stream in nccl.begun)
    assert first is not second
    assert 0 not in (first, second)
    for member in members:
        member.drop()


@pytest.mark.parametrize("before", [None, "3"])
def test_torch_may_not_end_the_process_for_this_group_and_may_for_others(monkeypatch, nccl, before):
    if before is None:
        monkeypatch.delenv(broadcast_group.ERROR_HANDLING, raising=False)
    else:
        monkeypatch.setenv(broadcast_group.ERROR_HANDLING, before)
    spec, store = group_of(0)
    BroadcastGroup(spec, 0, store).drop()
    assert [made.handling for made in nccl.made] == ["0"]
    assert os.environ.get(broadcast_group.ERROR_HANDLING) == before


def test_a_member_that_leaves_aborts_its_own_broadcast(nccl):
    spec, store = group_of(1, timeout_s=30.0)
    with ThreadPoolExecutor(2) as pool:
        joined = pool.submit(BroadcastGroup, spec, 1)
        group = BroadcastGroup(spec, 0, store)
        member = joined.result(10)
        # The other one is there, and then never begins its kernel.
        member._nccl = SimpleNamespace(broadcast=lambda *_: None, abort=lambda: None)
        there = pool.submit(member.broadcast, torch.zeros(3))
        sending = pool.submit(group.broadcast, torch.zeros(3))
        there.result(10)
        while not nccl.begun:
            time.sleep(0.01)
        start = time.monotonic()
        group.drop()
        with pytest.raises(GroupError, match="NCCL communicator was aborted"):
            sending.result(10)
    assert time.monotonic() - start < 5
    assert [made.rank for made in nccl.made if made.aborted.is_set()] == [0]
    member.drop()


def test_a_broadcast_that_is_late_is_an_error_at_the_deadline(nccl):
    spec, store = group_of(1, timeout_s=30.0)
    with ThreadPoolExecutor(2) as pool:
        joined = pool.submit(BroadcastGroup, spec, 1)
        group = BroadcastGroup(spec, 0, store)
        member = joined.result(10)
        member._nccl = SimpleNamespace(broadcast=lambda *_: None, abort=lambda: None)
        there = pool.submit(member.broadcast, torch.zeros(3))
        start = time.monotonic()
        with pytest.raises(GroupError, match="NCCL timed out"):
            group.broadcast(torch.zeros(3), deadline=start + 1)
        there.result(10)
    assert time.monotonic() - start < 5
    group.drop()
    member.drop()


def test_an_engine_that_has_loaded_waits_for_its_own_stream_alone(monkeypatch):
    """The device as a whole may be receiving the next bucket."""
    waited = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: waited.append(1)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("waits for the whole device"))
    told = update(SimpleNamespace(), {"slimrl_received_bucket": "g", "number": 0, "parts": []}, OnlyRank())
    assert told == (False, "rank 0: GroupError: not in group g")
    assert waited == [1]
