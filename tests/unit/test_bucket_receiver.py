"""The ranks of an engine on two nodes, as threads of this process, receive buckets and load them."""

import base64
import os
import pickle
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import psutil
import pytest
import torch
from engine_ranks import OnlyRank
from thread_meeting import Meeting

from slimrl import device
from slimrl.data.model_weights import GroupSpec, TensorPart, TensorSpec
from slimrl.engines.plugin import bucket_receiver
from slimrl.engines.plugin.bucket_loader import (
    around_destroy_group,
    leave_group,
    open_payload,
    received_payload,
    update,
)
from slimrl.engines.plugin.bucket_receiver import BucketReceiver, EngineReceivers
from slimrl.resync.ipc.broadcast_group import BroadcastGroup, GroupError, serve_store
from slimrl.resync.ipc.shared_buffer import SHARED_MEMORY_DIR

pytestmark = pytest.mark.skipif(device.device_type() == "cuda", reason="the receivers here take host memory")

RANKS, PER_NODE = 4, 2
BUCKET_BYTES = 160


class Model:
    config = SimpleNamespace(model_type="qwen3_moe")

    def __init__(self):
        self.loaded = {}
        self.refuses = False

    def load_weights(self, tensors):
        if self.refuses:
            raise ValueError("refused")
        self.loaded |= {name: tensor.clone() for name, tensor in tensors}


class ThreadRank:
    """Implements EngineRanks."""

    def __init__(self, rank, meeting):
        self.rank, self.per_node, self._meeting, self.kept = rank, PER_NODE, meeting, {}

    def exchange(self, value):
        return self._meeting.exchange(self.rank, value)


class Engine:
    def __init__(self):
        meeting = Meeting(RANKS)
        self.ranks = [ThreadRank(rank, meeting) for rank in range(RANKS)]
        self.models = [Model() for _ in self.ranks]

    def tell(self, payload):
        """(success, message) of each rank."""
        value = pickle.loads(base64.b64decode(payload))
        with ThreadPoolExecutor(RANKS) as pool:
            return list(pool.map(lambda model, rank: update(model, value, rank), self.models, self.ranks))


def bucket_of(values):
    spec = TensorSpec(name="w", shape=tuple(values.shape), dtype="float32")
    return [TensorPart(spec=spec, start=0, stop=len(values), offset=0, nbytes=values.nbytes)]


def group_of(num_receivers, timeout_s=10.0, name="slimrl-test"):
    store = serve_store("127.0.0.1", num_receivers + 1, timeout_s)
    spec = GroupSpec(
        name=name, address="127.0.0.1", port=store.port, world_size=num_receivers + 1, backend="gloo",
        bucket_bytes=BUCKET_BYTES, timeout_s=timeout_s,
    )  # fmt: skip
    return spec, store


def send(group, values):
    """As the trainer does."""
    group.announce(values.nbytes)
    group.broadcast(values.view(torch.uint8))


def announce_three(group):
    """To members of which one has left; what is small is out before that is noticed."""
    for _ in range(3):
        group.announce(8)


def own_segments():
    return {path.name for path in SHARED_MEMORY_DIR.glob(f"slimrl-received-*-{os.getpid()}-*")}


def test_one_rank_of_each_node_receives_and_all_load():
    engine = Engine()
    spec, store = group_of(2)
    assert engine.tell(open_payload(spec, 1)) == [(True, "Success")] * RANKS
    group = BroadcastGroup(spec, 0, store)
    for version in range(2):
        if version:
            assert engine.tell(open_payload(spec, 1)) == [(True, "Success")] * RANKS
        for number, rows in enumerate((6, 2, 9)):
            values = torch.randn(rows)
            send(group, values)
            told = engine.tell(received_payload(spec.name, number, bucket_of(values)))
            assert told == [(True, "Success")] * RANKS
            assert all(torch.equal(model.loaded["w"], values) for model in engine.models)
            assert own_segments() == set()
        group.announce(0)
    group.drop()


def test_an_engine_maps_two_buffers_per_node_and_rank_however_many_buckets_of_whatever_sizes_come():
    before = mappings()
    engine = Engine()
    spec, store = group_of(2)
    group = None
    for _ in range(2):
        engine.tell(open_payload(spec, 1))
        group = group or BroadcastGroup(spec, 0, store)
        for number in range(8):
            values = torch.randn(2 * (number + 1))
            send(group, values)
            assert engine.tell(received_payload(spec.name, number, bucket_of(values)))[0] == (True, "Success")
        group.announce(0)
    # The ranks are threads of one process here, so the receiver's own mappings are counted with its neighbour's.
    assert len(mappings() - before) == 2 * RANKS
    group.drop()


def mappings():
    """(addresses, file) of what this process maps of receivers' memory."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {(line.split()[0], line.split()[5]) for line in lines if "/slimrl-received-" in line}


def test_a_bucket_that_came_while_another_was_loaded_is_found_by_all_ranks():
    engine = Engine()
    spec, store = group_of(2)
    engine.tell(open_payload(spec, 1))
    group = BroadcastGroup(spec, 0, store)
    first, second = torch.randn(2), torch.randn(3)
    send(group, first)
    send(group, second)
    for number, values in enumerate((first, second)):
        told = engine.tell(received_payload(spec.name, number, bucket_of(values)))
        assert told == [(True, "Success")] * RANKS
        assert all(torch.equal(model.loaded["w"], values) for model in engine.models)
    group.drop()


def test_a_draft_model_loads_what_the_process_received_for_all_of_its_models():
    ranks, model, draft = OnlyRank(), Model(), Model()
    spec, store = group_of(1)

    def tell(of, payload):
        return update(of, pickle.loads(base64.b64decode(payload)), ranks)

    assert tell(model, open_payload(spec, 1)) == (True, "Success")
    group = BroadcastGroup(spec, 0, store)
    for number, of in enumerate((model, draft)):
        values = torch.full((3,), float(number))
        send(group, values)
        assert tell(of, received_payload(spec.name, number, bucket_of(values))) == (True, "Success")
        assert torch.equal(of.loaded["w"], values)
    group.announce(0)
    group.drop()
    assert leave_group(ranks)


@pytest.mark.parametrize("error", [OSError("no space left"), RuntimeError("out of memory")])
def test_a_receiver_without_memory_says_so_at_once_and_the_trainer_need_not_wait_for_it(monkeypatch, error):
    def no_memory(nbytes, name, compute_device):
        raise error

    monkeypatch.setattr(bucket_receiver, "shared_buffer", no_memory)
    receivers = EngineReceivers(OnlyRank())
    spec, store = group_of(1, timeout_s=30.0)
    receivers.open_version(spec, 1)
    group = BroadcastGroup(spec, 0, store)
    start = time.monotonic()
    with pytest.raises(GroupError, match="broadcast: "):
        announce_three(group)
    with pytest.raises(GroupError, match=str(error)):
        receivers.bucket(spec.name, 0)
    assert time.monotonic() - start < 10
    group.drop()
    receivers.close()


def test_an_engine_leaves_a_group_once(monkeypatch):
    ranks, (spec, store) = OnlyRank(), group_of(1)
    monkeypatch.setattr(bucket_receiver, "EngineRanks", lambda: ranks)
    assert update(Model(), pickle.loads(base64.b64decode(open_payload(spec, 1))), ranks) == (True, "Success")
    group = BroadcastGroup(spec, 0, store)
    updater = SimpleNamespace(get_model=Model)
    told = [around_destroy_group(lambda *_: (True, "SGLang's own"), updater, spec.name) for _ in range(2)]
    assert told == [(True, "Success"), (True, "SGLang's own")]
    group.drop()


def test_broadcasts_share_a_deadline_and_none_outlasts_it():
    spec, store = group_of(1, timeout_s=30.0)
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(BroadcastGroup, spec, 1)
        group = BroadcastGroup(spec, 0, store)
        member = joined.result(10)
    start = time.monotonic()
    for _ in range(2):
        with pytest.raises(GroupError, match="broadcast: "):
            group.broadcast(torch.zeros(1000), deadline=start + 0.5)
    assert time.monotonic() - start < 5
    group.drop()
    member.drop()


def test_a_receiver_notices_at_once_that_the_trainer_dropped_a_group_which_another_member_left():
    receivers = EngineReceivers(OnlyRank())
    spec, store = group_of(2, timeout_s=30.0)
    receivers.open_version(spec, 1)

    def join_and_leave():
        member = BroadcastGroup(spec, 2)
        member.announced()
        member.drop()

    with ThreadPoolExecutor(1) as pool:
        left = pool.submit(join_and_leave)
        group = BroadcastGroup(spec, 0, store)
        group.announce(8)
        left.result(10)
    time.sleep(0.2)
    start = time.monotonic()
    # The error is kept, as a resync keeps it until all ranks know of it.
    with pytest.raises(GroupError) as kept:
        announce_three(group)
    group.drop()
    with pytest.raises(GroupError, match="broadcast: "):
        receivers.bucket(spec.name, 3)
    receivers.close()
    assert time.monotonic() - start < 5
    assert kept.value is not None


def test_an_error_that_is_kept_keeps_no_connection_of_a_group_that_was_dropped():
    class Connection:
        def broadcast(self, tensors, options):
            return SimpleNamespace(wait=fails, connection=self)

    def fails(limit):
        raise RuntimeError("the peer left")

    member = object.__new__(BroadcastGroup)
    member._timeout, member._gloo, member._nccl = timedelta(seconds=1), [Connection()], None
    alive = weakref.ref(member._gloo[0])
    with pytest.raises(GroupError, match="the peer left") as kept:
        member.broadcast(torch.zeros(1))
    assert alive() is not None
    member.drop()
    for thread in threading.enumerate():
        if thread.name == "drop-group":
            thread.join(5)
    assert alive() is None
    assert kept.value is not None


def test_a_member_that_left_a_group_sends_and_receives_nothing_more():
    spec, store = group_of(1)
    values, received = torch.randn(50), torch.zeros(50)

    def receive():
        member = BroadcastGroup(spec, 1)
        member.broadcast(received)
        member.drop()
        with pytest.raises(GroupError, match="this member has left the group"):
            member.broadcast(received)

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(receive)
        group = BroadcastGroup(spec, 0, store)
        group.broadcast(values)
        done.result(10)
    assert torch.equal(received, values)
    group.drop()


def test_what_one_rank_cannot_load_is_told_by_all_of_them():
    engine = Engine()
    engine.models[2].refuses = True
    spec, store = group_of(2)
    engine.tell(open_payload(spec, 1))
    group = BroadcastGroup(spec, 0, store)
    values = torch.randn(3)
    send(group, values)
    told = engine.tell(received_payload(spec.name, 0, bucket_of(values)))
    assert told == [(False, "rank 2: ValueError: refused")] * RANKS
    group.drop()


def test_a_bucket_of_another_group_or_one_that_never_comes_is_an_error_in_bounded_time():
    engine = Engine()
    spec, store = group_of(2, timeout_s=1.0)
    engine.tell(open_payload(spec, 1))
    group = BroadcastGroup(spec, 0, store)
    for name, text in (("slimrl-other", "not in group slimrl-other"), (spec.name, "bucket 0 has not come within")):
        for success, message in engine.tell(received_payload(name, 0, bucket_of(torch.zeros(1)))):
            assert not success
            assert text in message
    group.drop()


def test_an_engine_whose_group_broke_joins_the_next_one():
    engine = Engine()
    spec, store = group_of(2, timeout_s=1.0, name="slimrl-first")
    engine.tell(open_payload(spec, 1))
    del store
    spec, store = group_of(2, name="slimrl-second")
    assert engine.tell(open_payload(spec, 1)) == [(True, "Success")] * RANKS
    group = BroadcastGroup(spec, 0, store)
    values = torch.randn(5)
    send(group, values)
    assert engine.tell(received_payload(spec.name, 0, bucket_of(values))) == [(True, "Success")] * RANKS
    group.drop()


def test_a_member_that_does_not_join_is_an_error_within_the_deadline():
    spec, store = group_of(1, timeout_s=0.5)
    with pytest.raises(GroupError, match="joining group slimrl-test"):
        BroadcastGroup(spec, 0, store)


def test_every_wait_of_a_receiver_is_for_half_of_the_groups_deadline():
    spec = GroupSpec(
        name="g", address="127.0.0.1", port=1, world_size=2, backend="gloo", bucket_bytes=8, timeout_s=40.0
    )  # fmt: skip
    receiver, waits = BucketReceiver(spec, 1), []

    def wait_for(holds, timeout_s):
        waits.append(timeout_s)
        return holds()

    changed = MagicMock()
    changed.wait_for = wait_for
    receiver._changed = changed
    receiver._thread = SimpleNamespace(join=waits.append, is_alive=lambda: True)
    with pytest.raises(GroupError, match="the version before has not ended"):
        receiver.open_version()
    with pytest.raises(GroupError, match="bucket 3 has not come within 20 s"):
        receiver.bucket(3)
    receiver.close()
    assert waits == [20.0] * 2
    receiver._error = "broken"
    receiver._thread = SimpleNamespace(join=waits.append, is_alive=lambda: False)
    for ask in (lambda: receiver.open_version(), lambda: receiver.bucket(3)):
        with pytest.raises(GroupError, match=r"^broken$"):
            ask()


def test_the_store_listens_on_the_given_address_alone():
    store = serve_store("127.0.0.1", 1, 5.0)
    listening = {each.laddr.ip for each in psutil.Process().net_connections("tcp") if each.laddr.port == store.port}
    assert listening == {"127.0.0.1"}
