"""The ranks of an engine on two nodes, as threads of this process, receive buckets and load them."""

import base64
import os
import pickle
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from itertools import chain
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from engine_ranks import OnlyRank
from thread_meeting import Meeting

from slimrl import device
from slimrl.data.protocols import BucketSpec, GroupSpec, TensorPart, TensorSpec
from slimrl.models.broadcast_group import UNDER_WAY, BroadcastGroup, GroupError, serve_store
from slimrl.models.broadcast_pieces import cut_pieces, decode_pieces, encode_pieces
from slimrl.models.shared_segment import SHARED_MEMORY_DIR
from slimrl.rollout.bucket_loader import around_destroy_group, open_payload, received_payload, update
from slimrl.rollout.bucket_receiver import BucketReceiver, EngineReceivers

pytestmark = pytest.mark.skipif(device.device_type() == "cuda", reason="the receivers here take host memory")

RANKS, PER_NODE = 4, 2
BUCKET_BYTES = 160


class Model:
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
        self.rank, self.per_node, self._meeting = rank, PER_NODE, meeting

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
    return BucketSpec(
        parts=(TensorPart(spec=spec, start=0, stop=len(values), offset=0, nbytes=values.nbytes),), nbytes=values.nbytes
    )


def group_of(num_receivers, timeout_s=10.0, name="slimrl-test"):
    store = serve_store("127.0.0.1", num_receivers + 1, timeout_s)
    spec = GroupSpec(
        name=name, address="127.0.0.1", port=store.port, world_size=num_receivers + 1, backend="gloo",
        bucket_bytes=BUCKET_BYTES, timeout_s=timeout_s,
    )  # fmt: skip
    return spec, store


def send(group, values):
    send_bucket(group, bucket_of(values), values.view(torch.uint8))


def send_bucket(group, bucket, flat):
    """As the trainer does; tensors of 8 bytes are large."""
    pieces = announce(group, bucket)
    group.broadcast(*flat.split([piece.nbytes for piece in pieces]))


def announce(group, bucket, sources=MappingProxyType({})):
    pieces = cut_pieces(bucket, 8, sources)
    table = torch.frombuffer(encode_pieces(pieces), dtype=torch.uint8)
    group.broadcast(torch.tensor([bucket.nbytes, len(table)]))
    group.broadcast(table)
    return pieces


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
        group.broadcast(torch.zeros(2, dtype=torch.int64))
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
        group.broadcast(torch.zeros(2, dtype=torch.int64))
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


def test_large_tensors_go_straight_to_where_they_are_wanted_if_they_fit():
    wanted = {
        "fits": torch.zeros(3, 2),
        "other shape": torch.zeros(2, 3),
        "other dtype": torch.zeros(3, 2, dtype=torch.int32),
        "in rows": torch.zeros(3, 2),
        "small": torch.zeros(1),
    }
    specs = [TensorSpec(name=name, shape=(3, 2), dtype="float32") for name in ("unknown", *wanted)]
    specs[-1] = TensorSpec(name="small", shape=(1,), dtype="float32")
    parts, offset = [], 0
    for spec in specs:
        stop = 2 if spec.name == "in rows" else spec.shape[0]
        nbytes = 4 * stop * (1 if spec.name == "small" else 2)
        parts.append(TensorPart(spec=spec, start=0, stop=stop, offset=offset, nbytes=nbytes))
        offset += nbytes
    bucket, flat = BucketSpec(parts=tuple(parts), nbytes=offset), torch.randn(offset // 4).view(torch.uint8)
    receivers = EngineReceivers(OnlyRank())
    spec, store = group_of(1)
    receivers.open_version(spec, 1, wanted)
    group = BroadcastGroup(spec, 0, store)
    send_bucket(group, bucket, flat)
    buffer = receivers.bucket(spec.name, 0)
    assert receivers.placed(0) == {"fits"}
    for part in parts:
        came, sent = (each[part.offset : part.offset + part.nbytes] for each in (buffer, flat))
        if part.spec.name == "fits":
            came = wanted["fits"].view(-1).view(torch.uint8)
        assert torch.equal(came, sent), part
    assert all(not wanted[name].any() for name in wanted if name != "fits")
    group.drop()
    receivers.close()


def test_an_engine_does_not_leave_a_group_that_may_still_write_to_its_parameters(monkeypatch):
    values, wanted = torch.randn(4), torch.zeros(4)
    receivers, model = EngineReceivers(OnlyRank()), Model()
    updater = SimpleNamespace(get_model=lambda: model)
    model.slimrl_receivers = receivers
    spec, store = group_of(1, timeout_s=2.0)
    ends = threading.Event()

    def receive_that_nothing_breaks_off(group, shares):
        """While it writes to a parameter."""
        assert receivers._receiver._placing
        assert ends.wait(20)
        raise GroupError("broadcast: out of time")

    def leave():
        return around_destroy_group(lambda *_: (True, "SGLang's own"), updater, spec.name)

    monkeypatch.setattr(BroadcastGroup, "receive", receive_that_nothing_breaks_off)
    receivers.open_version(spec, 1, {"w": wanted})
    group = BroadcastGroup(spec, 0, store)
    announce(group, bucket_of(values))
    wait_until_placing(receivers, True)
    assert leave() == (False, f"group {spec.name} still receives")
    with pytest.raises(GroupError, match="still receives"):
        receivers.open_version(replace(spec, name="slimrl-next"), 1)
    ends.set()
    wait_until_placing(receivers, False)
    assert leave() == (True, "Success")
    assert leave() == (True, "SGLang's own")
    group.drop()


def wait_until_placing(receivers, placing):
    """Until the receiver's thread waits for what goes straight into a parameter, or does so no more."""
    receiver = receivers._receiver
    with receiver._changed:
        assert receiver._changed.wait_for(lambda: receiver._placing is placing, 10)


@pytest.mark.parametrize(
    ("table", "error"),
    [
        (b"[[8, 0", "JSONDecodeError"),
        (b"[[8]]", "ValueError: not enough values"),
        (b'[["8", 0, "", [], "", 0]]', "TypeError"),
        (b'[[8, 0, "", [], "", 1]]', "IndexError"),
        (b'[[8, 0, "w", [2], "float5", 0]]', "AttributeError: module 'torch' has no attribute 'float5'"),
    ],
)
def test_what_a_receiver_does_not_understand_is_told_at_once(table, error):
    receivers = EngineReceivers(OnlyRank())
    spec, store = group_of(1, timeout_s=30.0)
    receivers.open_version(spec, 1, {"w": torch.zeros(2)})
    group = BroadcastGroup(spec, 0, store)
    group.broadcast(torch.tensor([8, len(table)]))
    group.broadcast(torch.frombuffer(bytearray(table), dtype=torch.uint8))
    start = time.monotonic()
    with pytest.raises(GroupError, match=error):
        receivers.bucket(spec.name, 0)
    assert time.monotonic() - start < 10
    group.drop()
    receivers.close()


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


def test_a_receiver_can_leave_as_soon_as_the_trainer_drops_a_group_that_another_member_left():
    wanted = {f"w{number}": torch.zeros(2) for number in range(3)}
    parts = [
        TensorPart(spec=TensorSpec(name=name, shape=(2,), dtype="float32"), start=0, stop=2, offset=8 * i, nbytes=8)
        for i, name in enumerate(wanted)
    ]
    bucket = BucketSpec(parts=tuple(parts), nbytes=24)
    receivers = EngineReceivers(OnlyRank())
    spec, store = group_of(2)
    receivers.open_version(spec, 1, wanted)

    def join_and_leave():
        member = BroadcastGroup(spec, 2)
        member.broadcast(torch.zeros(2, dtype=torch.int64))
        member.broadcast(torch.frombuffer(encode_pieces(cut_pieces(bucket, 8, {})), dtype=torch.uint8))
        member.drop()

    with ThreadPoolExecutor(1) as pool:
        left = pool.submit(join_and_leave)
        group = BroadcastGroup(spec, 0, store)
        announce(group, bucket)
        left.result(10)
    time.sleep(0.2)
    # The error is kept, as a resync keeps it until all ranks know of it.
    with pytest.raises(GroupError) as kept:
        group.broadcast(*torch.randn(6).view(torch.uint8).split(8))
    group.drop()
    start = time.monotonic()
    receivers.close()
    assert time.monotonic() - start < 3
    assert kept.value is not None


def test_an_error_that_is_kept_keeps_no_connection_of_a_group_that_was_dropped():
    class Connection:
        def broadcast(self, tensors, options):
            return SimpleNamespace(wait=fails, connection=self)

    def fails(limit):
        raise RuntimeError("the peer left")

    member = object.__new__(BroadcastGroup)
    member._timeout, member._streams = timedelta(seconds=1), [[Connection(), Connection()]]
    alive = [weakref.ref(connection) for connection in member._streams[0]]
    with pytest.raises(GroupError, match="the peer left") as kept:
        member.broadcast(*torch.zeros(UNDER_WAY - 1).split(1))
    assert all(reference() is not None for reference in alive)
    member.drop()
    for thread in threading.enumerate():
        if thread.name == "drop-group":
            thread.join(5)
    assert [reference() for reference in alive] == [None, None]
    assert kept.value is not None


def test_a_group_carries_any_number_of_tensors_in_order():
    spec, store = group_of(1)
    tensors = [torch.full((number,), number) for number in range(1, 3 * UNDER_WAY)]
    received = [torch.zeros_like(tensor) for tensor in tensors]

    def receive():
        member = BroadcastGroup(spec, 1)
        member.broadcast(*received)
        member.drop()
        with pytest.raises(GroupError, match="the group was left"):
            member.broadcast(*received)

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(receive)
        group = BroadcastGroup(spec, 0, store)
        group.broadcast(*tensors)
        done.result(10)
    assert all(map(torch.equal, received, tensors))
    group.drop()


def groups_of_sources(spec, store):
    """Of each source."""
    with ThreadPoolExecutor(spec.num_sources) as pool:
        others = [pool.submit(BroadcastGroup, spec, 0, source=source) for source in range(1, spec.num_sources)]
        first = BroadcastGroup(spec, 0, store)
        return [first, *(other.result(10) for other in others)]


@pytest.mark.parametrize("counts", [(3, 40), (40, 3), (0, 9), (9, 0)])
def test_several_sources_send_side_by_side_however_much_each_has(counts):
    spec, store = group_of(1)
    spec = replace(spec, num_sources=2)
    shares = [[torch.randn(50) for _ in range(count)] for count in counts]
    received = [[torch.zeros(50) for _ in share] for share in shares]
    with ThreadPoolExecutor(3) as pool:
        member = pool.submit(BroadcastGroup, spec, 1)
        sources = groups_of_sources(spec, store)
        done = pool.submit(member.result(10).receive, received)
        for sent in [pool.submit(group.broadcast, *share) for group, share in zip(sources, shares, strict=True)]:
            sent.result(10)
        done.result(10)
    assert all(map(torch.equal, chain(*received), chain(*shares)))
    for group in (*sources, member.result()):
        group.drop()


def test_when_a_source_leaves_the_receiver_fails_at_once_and_the_other_source_with_it():
    spec, store = group_of(1, timeout_s=30.0)
    spec = replace(spec, num_sources=2)
    receivers = EngineReceivers(OnlyRank())
    receivers.open_version(spec, 1)
    first, second = groups_of_sources(spec, store)
    values = torch.randn(8)
    parts = [
        TensorPart(spec=TensorSpec(name=name, shape=(4,), dtype="float32"), start=0, stop=4, offset=16 * i, nbytes=16)
        for i, name in enumerate(("w0", "w1"))
    ]
    announce(first, BucketSpec(parts=tuple(parts), nbytes=32), {16: 1})
    first.broadcast(values[:4].view(torch.uint8))
    start = time.monotonic()
    second.drop()
    with pytest.raises(GroupError, match="broadcast: "):
        receivers.bucket(spec.name, 0)
    with pytest.raises(GroupError, match="broadcast: "):
        first.broadcast(torch.zeros(2, dtype=torch.int64))
    assert time.monotonic() - start < 10
    first.drop()
    receivers.close()


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


def test_pieces_cover_a_bucket_without_gaps_and_come_back_from_their_table():
    sizes = {"a": 4, "b": 8, "c": 2, "d": 1, "e": 9, "f": 8}
    parts, end = [], 0
    for name, size in sizes.items():
        spec = TensorSpec(name=name, shape=(size * 2 if name == "f" else size,), dtype="uint8")
        parts.append(TensorPart(spec=spec, start=0, stop=size, offset=end, nbytes=size))
        end += size
    bucket = BucketSpec(parts=tuple(parts), nbytes=end)
    pieces = cut_pieces(bucket, 8, {4: 2})
    assert [(piece.name, piece.offset, piece.nbytes, piece.source) for piece in pieces] == [
        ("", 0, 4, 0), ("b", 4, 8, 2), ("", 12, 3, 0), ("e", 15, 9, 0), ("", 24, 8, 0),
    ]  # fmt: skip
    assert decode_pieces(encode_pieces(pieces)) == pieces
    assert [(piece.offset, piece.nbytes) for piece in cut_pieces(bucket, None, {4: 2})] == [(0, end)]


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
        receiver.open_version({})
    with pytest.raises(GroupError, match="bucket 3 has not come within 20 s"):
        receiver.bucket(3)
    receiver.close()
    assert waits == [20.0] * 3
    receiver._error = "broken"
    receiver._thread = SimpleNamespace(join=waits.append, is_alive=lambda: False)
    for ask in (lambda: receiver.open_version({}), lambda: receiver.bucket(3)):
        with pytest.raises(GroupError, match=r"^broken$"):
            ask()
