"""The sender's side of a broadcast, with groups and engines that only note what they are told."""

import time
from types import SimpleNamespace

import pytest
import torch
from resync_engines import Source, config, weights

from slimrl.config.schema.resync import DeltaEncoding, TransportName
from slimrl.data.engine import EngineError
from slimrl.data.model_weights import EnginePlace, TensorPart, TensorSpec
from slimrl.resync.engine_calls import EnginesFailed
from slimrl.resync.ipc.broadcast_group import GroupError
from slimrl.resync.plan import plan_resync
from slimrl.resync.session import make_transport
from slimrl.resync.transports import collective
from slimrl.resync.transports.collective import LOADS_END_S, CollectiveTransport

TIMEOUT_S = 20.0
BUCKET = [TensorPart(spec=TensorSpec(name="w", shape=(2,), dtype="float32"), start=0, stop=2, offset=0, nbytes=8)]


class Member:
    """Takes the place of BroadcastGroup."""

    def __init__(self, spec, rank, store=None):
        if Member.refuses_to_join:
            raise GroupError("joining: nobody came")
        self.spec, self.rank, self.left, self.sent = spec, rank, False, []
        self.breaks_at = -1
        Member.made.append(self)

    def announce(self, nbytes, deadline=None):
        self._send(nbytes, deadline)

    def broadcast(self, tensor, deadline=None):
        self._send(tensor.clone(), deadline)

    def _send(self, what, deadline):
        if len(self.sent) == self.breaks_at:
            raise GroupError("broadcast: a peer left")
        self.sent.append((what, deadline))

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

    def load_received(self, group, number, parts):
        time.sleep(self.load_s)
        self._note(("load", number))

    def leave_group(self, group):
        self._note("leave")


@pytest.fixture(autouse=True)
def members(monkeypatch):
    Member.made, Member.refuses_to_join = [], False
    monkeypatch.setattr(collective, "BroadcastGroup", Member)
    monkeypatch.setattr(collective, "serve_store", lambda address, world_size, timeout_s: SimpleNamespace(port=7))
    return Member.made


def new_transport():
    return CollectiveTransport("10.0.0.1", "slimrl-test", TIMEOUT_S, bucket_bytes=100)


def begun(*engines):
    transport = new_transport()
    transport.begin(1, engines)
    return transport


def send(transport):
    transport.send(BUCKET, SimpleNamespace(tensor=torch.zeros(100, dtype=torch.uint8)))


def test_each_node_of_each_engine_has_a_rank_in_the_group(members):
    engines = [Engine("a"), Engine("b", ("y", "z")), Engine("c")]
    transport = begun(*engines)
    spec = members[0].spec
    assert spec is transport.group
    assert (spec.world_size, spec.address, spec.port) == (1 + 4, "10.0.0.1", 7)
    assert (spec.bucket_bytes, spec.timeout_s, members[0].rank) == (100, TIMEOUT_S, 0)
    assert spec.name.startswith("slimrl-test-")
    assert [engine.calls for engine in engines] == [["begin", ("open", spec.name, rank)] for rank in (1, 2, 4)]


def test_a_group_stays_until_engines_change_or_a_version_breaks_off(members):
    engines = [Engine("a"), Engine("b")]
    transport = new_transport()

    def version(number, *engines, breaks=False):
        transport.begin(number, engines)
        if not breaks:
            transport.end(number)
        return len(members)

    assert [version(1, *engines), version(2, *engines)] == [1, 1]
    assert version(3, *engines[::-1]) == 2
    assert version(4, *engines[::-1], breaks=True) == 2
    assert version(5, *engines[::-1]) == 3
    assert [member.left for member in members] == [True, True, False]
    assert len({member.spec.name for member in members}) == 3


def test_a_load_begins_when_the_bucket_is_out(members):
    engine = Engine("a")
    transport = begun(engine)
    for number in range(2):
        send(transport)
        assert len(members[0].sent) == 2 * (number + 1)
        transport.finish_calls()
        assert engine.calls.count(("load", number)) == 1
    transport.end(1)
    assert engine.calls[-1] == "end"


def test_all_is_announced_before_it_is_sent_and_the_end_too(members):
    transport = begun(Engine("a"))
    send(transport)
    transport.end(1)
    length, packed, end = (tensor for tensor, _ in members[0].sent)
    assert (length, len(packed), end) == (8, 8, 0)
    assert all(deadline - time.monotonic() == pytest.approx(TIMEOUT_S, abs=2) for _, deadline in members[0].sent)


def test_a_broadcast_that_breaks_off_leaves_the_group_and_names_the_engine_that_refused(members):
    for refuses, says in ((False, "broadcast: a peer left"), (True, "a: .*refused")):
        engine = Engine("a")
        engine.fails_at = ("load", 0) if refuses else None
        transport = begun(engine)
        members[-1].breaks_at = 3
        send(transport)
        with pytest.raises(EngineError, match=says) as raised:
            send(transport)
        assert isinstance(raised.value, EnginesFailed) is refuses
        assert members[-1].left
        transport.begin(2, [engine])
        assert not members[-1].left
        members[-1].breaks_at = 0
        with pytest.raises(EngineError, match="broadcast: a peer left"):
            transport.end(2)
        assert members[-1].left


def test_a_refused_bucket_leaves_the_group_when_the_one_after_the_next_is_sent(members):
    engine = Engine("a")
    engine.fails_at = ("load", 0)
    transport = begun(engine)
    send(transport)
    send(transport)
    with pytest.raises(EnginesFailed, match="refused"):
        send(transport)
    assert members[0].left


def test_loads_get_what_is_left_of_the_deadline_and_time_to_end():
    transport, waited = new_transport(), []

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
    transport = new_transport()
    transport.close()
    transport.begin(1, engines)
    transport.close()
    transport.close()
    assert [engine.calls.count("leave") for engine in engines] == [1, 1]
    assert (members[0].left, transport.group) == (True, None)


def test_a_group_that_nobody_joins_is_an_engine_s_fault():
    Member.refuses_to_join = True
    with pytest.raises(EngineError, match="nobody came"):
        begun(Engine("a"))


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
    broadcast.begin(1, [Engine("a")])
    assert broadcast.group.bucket_bytes == max(bucket.sent_bytes for bucket in plan.buckets)
    assert (broadcast.group.address, broadcast.group.timeout_s) == ("10.0.0.1", 3.0)
    assert broadcast.group.name.startswith("slimrl-run-")
    disk = made(TransportName.disk, keep=5)
    assert disk._directory.root == tmp_path / "run" / "resync"
    assert (disk._config.keep, disk._config.timeout_s) == (5, 3.0)
    assert sorted(spec.name for spec in disk._specs) == sorted(weights())
    elsewhere = made(TransportName.disk, dir=str(tmp_path / "shared"))
    assert elsewhere._directory.root == tmp_path / "shared" / "run"
    delta = made(TransportName.delta, local_dir=str(tmp_path / "own"), full_every=7, delta_encoding=DeltaEncoding.xor)
    assert delta._local_dir == tmp_path / "own" / "run"
    assert (delta._config.full_every, delta._config.delta_encoding) == (7, DeltaEncoding.xor)
    assert made(TransportName.ipc).overlapping
