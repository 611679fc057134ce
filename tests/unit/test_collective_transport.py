"""The sender's side of a broadcast, with groups and engines that only note what they are told."""

import time
from types import SimpleNamespace

import pytest
import torch
from resync_engines import Source, config, weights

from slimrl.config.schema import DeltaEncoding, TransportName
from slimrl.data.protocols import BucketSpec, EngineError, EnginePlace, GroupSpec, TensorPart, TensorSpec
from slimrl.models.broadcast_group import GroupError
from slimrl.resync import contribution
from slimrl.resync.contribution import SENDS, Contribution
from slimrl.resync.fan_out import EnginesFailed
from slimrl.resync.live import LiveTensors
from slimrl.resync.plan import plan_resync
from slimrl.resync.session import make_transport
from slimrl.resync.transports import collective
from slimrl.resync.transports.collective import LOADS_END_S, CollectiveTransport

TIMEOUT_S = 20.0
BUCKET = BucketSpec(
    parts=(TensorPart(spec=TensorSpec(name="w", shape=(2,), dtype="float32"), start=0, stop=2, offset=0, nbytes=8),),
    nbytes=8,
)
LIVE = LiveTensors({}, {})


class Member:
    """Takes the place of BroadcastGroup."""

    def __init__(self, spec, rank, store=None, *, source=0):
        if Member.refuses_to_join:
            raise GroupError("joining: nobody came")
        self.spec, self.rank, self.source, self.left, self.sent = spec, rank, source, False, []
        self.breaks_at = -1
        Member.made.append(self)

    def broadcast(self, *tensors, deadline=None):
        if len(self.sent) == self.breaks_at:
            raise GroupError("broadcast: a peer left")
        self.sent.append(([tensor.clone() for tensor in tensors], deadline))

    def drop(self):
        self.left = True


class Engine:
    def __init__(self, name, nodes=("x",)):
        self.name, self.place, self.calls = name, EnginePlace(name=name, nodes=nodes), []
        self.load_s, self.fails_at = 0.0, None

    def _note(self, call):
        self.calls.append(call)
        if call == self.fails_at:
            raise EngineError(f"{self.name}: {call}: refused")

    def begin_update(self):
        self._note("begin")

    def end_update(self):
        self._note("end")

    def open_receivers(self, group, first_rank):
        self._note(("open", group.name, first_rank))

    def load_received(self, group, number, bucket):
        time.sleep(self.load_s)
        self._note(("load", number))

    def leave_group(self, group):
        self._note("leave")


@pytest.fixture(autouse=True)
def members(monkeypatch):
    Member.made, Member.refuses_to_join = [], False
    for module in (collective, contribution):
        monkeypatch.setattr(module, "BroadcastGroup", Member)
    monkeypatch.setattr(collective, "serve_store", lambda address, world_size, timeout_s: SimpleNamespace(port=7))
    return Member.made


def transport_to(*engines, num_sources=1):
    transport = CollectiveTransport("10.0.0.1", "slimrl-test", TIMEOUT_S, bucket_bytes=100)
    transport.connect(engines, num_sources)
    return transport


def send(transport):
    transport.send(BUCKET, SimpleNamespace(tensor=torch.zeros(100, dtype=torch.uint8)), LIVE)


def test_each_node_of_each_engine_has_a_rank_in_the_group(members):
    engines = [Engine("a"), Engine("b", ("y", "z")), Engine("c")]
    transport = transport_to(*engines, num_sources=3)
    transport.begin(1)
    spec = members[0].spec
    assert spec is transport.group
    assert (spec.world_size, spec.num_sources, spec.address, spec.port) == (1 + 4, 3, "10.0.0.1", 7)
    assert (spec.bucket_bytes, spec.timeout_s, members[0].rank) == (100, TIMEOUT_S, 0)
    assert spec.name.startswith("slimrl-test-")
    assert [engine.calls for engine in engines] == [["begin", ("open", spec.name, rank)] for rank in (1, 2, 4)]


def test_a_group_stays_until_engines_or_sources_change_or_a_version_breaks_off(members):
    engines = [Engine("a"), Engine("b")]
    transport = transport_to(*engines)

    def version(number, *engines, num_sources=1, breaks=False):
        transport.connect(engines, num_sources)
        transport.begin(number)
        if not breaks:
            transport.end(number)
        return len(members)

    assert [version(1, *engines), version(2, *engines)] == [1, 1]
    assert version(3, *engines, num_sources=2) == 2
    assert version(4, *engines[::-1], num_sources=2) == 3
    assert version(5, *engines[::-1], num_sources=2, breaks=True) == 3
    assert version(6, *engines[::-1], num_sources=2) == 4
    assert [member.left for member in members] == [True, True, True, False]
    assert len({member.spec.name for member in members}) == 4


def test_a_load_begins_when_all_sources_have_sent_theirs():
    alone, first = Engine("a"), Engine("b")
    for engine, num_sources in ((alone, 1), (first, 2)):
        transport = transport_to(engine, num_sources=num_sources)
        transport.begin(1)
        for number in range(2):
            send(transport)
            transport.finish_calls()
            assert (("load", number) in engine.calls) is (num_sources == 1)
            transport.arrived()
            transport.finish_calls()
            assert engine.calls.count(("load", number)) == 1
        transport.end(1)
        assert engine.calls[-1] == "end"


def test_all_is_announced_before_it_is_sent_and_the_end_too(members):
    transport = transport_to(Engine("a"))
    transport.begin(1)
    send(transport)
    transport.end(1)
    sizes, table, packed, end = (tensors for tensors, _ in members[0].sent)
    assert sizes[0].tolist() == [BUCKET.nbytes, len(table[0])]
    assert [len(tensor) for tensor in packed] == [BUCKET.nbytes]
    assert end[0].tolist() == [0, 0]
    assert all(deadline - time.monotonic() == pytest.approx(TIMEOUT_S, abs=2) for _, deadline in members[0].sent)


def test_a_broadcast_that_breaks_off_leaves_the_group_and_names_the_engine_that_refused(members):
    for refuses, says in ((False, "broadcast: a peer left"), (True, "a: .*refused")):
        engine = Engine("a")
        engine.fails_at = ("load", 0) if refuses else None
        transport = transport_to(engine)
        transport.begin(1)
        members[-1].breaks_at = 4
        send(transport)
        with pytest.raises(EngineError, match=says) as raised:
            send(transport)
        assert isinstance(raised.value, EnginesFailed) is refuses
        assert members[-1].left
        transport.begin(2)
        assert not members[-1].left
        members[-1].breaks_at = 0
        with pytest.raises(EngineError, match="broadcast: a peer left"):
            transport.end(2)
        assert members[-1].left


def test_a_refused_bucket_leaves_the_group_when_the_one_after_the_next_is_sent(members):
    engine = Engine("a")
    engine.fails_at = ("load", 0)
    transport = transport_to(engine)
    transport.begin(1)
    send(transport)
    send(transport)
    with pytest.raises(EnginesFailed, match="refused"):
        send(transport)
    assert members[0].left


def test_loads_get_what_is_left_of_the_deadline_and_time_to_end():
    transport, waited = transport_to(), []

    def load(number, error=None):
        return number, SimpleNamespace(wait=lambda timeout_s: waited.append((number, timeout_s)) or error)

    now = time.monotonic()
    transport._loads.extend([load(0), load(1), load(2)])
    transport._finish_loads(0, now + 5)
    transport._finish_loads(1, now - 5)
    assert waited == [(0, pytest.approx(5 + LOADS_END_S, abs=0.5)), (1, LOADS_END_S)]
    waited.clear()
    transport._loads.extend([load(3, EngineError("third")), load(4, EngineError("fourth")), load(5)])
    with pytest.raises(EngineError, match="third"):
        transport._finish_loads(3, now + 5)
    assert [number for number, _ in waited] == [2, 3, 4, 5]
    assert waited[-1][1] == pytest.approx(TIMEOUT_S + LOADS_END_S, abs=0.5)


def test_engines_leave_once_whether_they_answer_or_not(members):
    engines = [Engine("a"), Engine("b")]
    engines[0].fails_at = "leave"
    transport = transport_to(*engines)
    transport.close()
    transport.begin(1)
    transport.close()
    transport.close()
    assert [engine.calls.count("leave") for engine in engines] == [1, 1]
    assert (members[0].left, transport.group) == (True, None)


def test_a_group_that_nobody_joins_is_an_engine_s_fault():
    Member.refuses_to_join = True
    with pytest.raises(EngineError, match="nobody came"):
        transport_to(Engine("a")).begin(1)
    with pytest.raises(EngineError, match="nobody came"):
        Contribution().join(group("one"), 1)


def group(name):
    return GroupSpec(
        name=name, address="10.0.0.1", port=7, world_size=2, backend="gloo", bucket_bytes=8, timeout_s=TIMEOUT_S
    )


def test_a_contribution_joins_each_group_once_and_sends_in_the_order_of_the_bucket(members):
    own = Contribution()
    own.join(group("one"), 1)
    own.join(group("one"), 1)
    own.send(LiveTensors({8: torch.tensor([8]), 0: torch.tensor([0]), 4: torch.tensor([4])}, {}))
    own.join(group("two"), 2)
    assert [(member.rank, member.source, member.left) for member in members] == [(0, 1, True), (0, 2, False)]
    ((tensors, deadline),) = members[0].sent
    assert [tensor.item() for tensor in tensors] == [0, 4, 8]
    assert deadline - time.monotonic() == pytest.approx(SENDS * TIMEOUT_S, abs=2)
    members[1].breaks_at = 0
    with pytest.raises(EngineError, match="a peer left"):
        own.send(LIVE)
    assert members[1].left
    own.join(group("two"), 2)
    assert len(members) == 3


def test_a_contribution_leaves_a_group_in_which_an_attempt_broke_off(members):
    own = Contribution()
    own.join(group("one"), 1)
    with own.left_if_broken():
        assert not members[0].left
    assert not members[0].left
    with pytest.raises(KeyboardInterrupt), own.left_if_broken():
        raise KeyboardInterrupt
    assert members[0].left
    own.leave()


def test_the_config_names_the_transport_and_where_it_writes(tmp_path):
    plan = plan_resync(
        Source(weights()).layout(), [""], [EnginePlace(name="a", nodes=("x",))], transport=TransportName.disk,
        bucket_bytes=160,
    )  # fmt: skip
    assert len(plan.buckets) > 1

    def made(transport, **changes):
        settings = config(transport=transport, timeout_s=3.0, **changes)
        return make_transport(
            settings, plan, run_id="run", address="10.0.0.1", model_dir=tmp_path, run_dir=tmp_path / "run"
        )

    broadcast = made(TransportName.collective)
    broadcast.connect([Engine("a")], 1)
    broadcast.begin(1)
    assert broadcast.group.bucket_bytes == max(bucket.sent.nbytes for bucket in plan.buckets)
    assert (broadcast.group.address, broadcast.group.timeout_s) == ("10.0.0.1", 3.0)
    assert broadcast.group.name.startswith("slimrl-run-")
    disk = made(TransportName.disk, keep=5)
    assert (disk._directory.root, disk._keep, disk._timeout_s) == (tmp_path / "run" / "resync", 5, 3.0)
    assert sorted(spec.name for spec in disk._specs) == sorted(weights())
    elsewhere = made(TransportName.disk, dir=str(tmp_path / "shared"))
    assert elsewhere._directory.root == tmp_path / "shared" / "run"
    delta = made(TransportName.delta, local_dir=str(tmp_path / "own"), full_every=7, delta_encoding=DeltaEncoding.xor)
    assert (delta._local_dir, delta._full_every, delta._encoding) == (tmp_path / "own" / "run", 7, DeltaEncoding.xor)
    assert made(TransportName.ipc).overlapping
