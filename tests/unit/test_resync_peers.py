"""Resyncs over p2p: of a trainer of one rank, and of four that are threads, with engines that live in this process."""

import threading
import time
from dataclasses import replace

import pytest
from resync_engines import Engine, Source, config, session, weights
from test_resync_ranks import SHAPES, assert_loaded, random_weights, resynced
from thread_dist import ThreadDist

from slimrl import device
from slimrl.config.schema.resync import TransportName
from slimrl.data.engine import EngineError
from slimrl.data.model_weights import EnginePlace
from slimrl.data.peer_messages import ALIGNMENT
from slimrl.models.fingerprint import fingerprint
from slimrl.quantization.fp8 import NOT_FINITE, BlockFp8, dequantize, quantize
from slimrl.resync import ranks
from slimrl.resync.p2p.sender import EngineSender
from slimrl.resync.report import ResyncError
from slimrl.resync.transform import Quantize, RoundToFp8

pytestmark = [
    pytest.mark.skipif(device.device_type() == "cuda", reason="the engines here have host memory"),
    pytest.mark.usefixtures("in_process_store"),
]

FIRST = ["pause", "begin", "kept", "join", "receive", "end", "flush", "version", "fingerprints", "resume"]
LATER = [call for call in FIRST if call not in ("kept", "join")]


def over_p2p(**changes):
    return config(**{"transport": TransportName.p2p, "bucket_bytes": 400, "timeout_s": 10.0, **changes})


def unlike(name):
    """An engine that keeps the same otherwise, so no other feeds it."""
    engine = Engine(name)
    engine.cuts_rows = True
    return engine


@pytest.fixture
def resyncs():
    made = []

    def make(engines, source=None, **options):
        settings = over_p2p(**{key: options.pop(key) for key in ("timeout_s", "bucket_bytes") if key in options})
        made.append(session(source or Source(weights()), engines, settings, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()
    for engine in (engine for each in made for engine in each._transfer._engines):
        engine.leave()


def nbytes(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


@pytest.mark.parametrize("second", [Engine, unlike])
def test_engines_hold_the_source_s_bytes_and_each_came_once(resyncs, second):
    source, engines = Source(weights()), [Engine("engine 0"), second("engine 1")]
    resync, seen = resyncs(engines, source), []
    for version in (3, 4):
        source.weights = weights(version)
        report = resync.run(version, on_progress=lambda done, total: seen.append((done, total)))
        assert (report.version, report.mismatching, report.failed_engines) == (version, (), {})
        assert report.verified_tensors == 2 * len(source.weights)
        assert report.bytes == nbytes(source.weights)
        assert report.received_per_rank == {engine.name: (report.bytes,) for engine in engines}
        # An engine that is like another one is fed by it.
        assert tuple(report.sent_per_rank) == (report.bytes * (1 if second is Engine else 2),)
        assert report.buckets > 1
        assert 0 < report.peak_extra_bytes <= 400 + 2 * 2 * ALIGNMENT * len(source.weights)
        for engine in engines:
            assert engine.version == version
            assert_loaded(engine, source.weights)
    assert [engine.calls for engine in engines] == [FIRST + LATER] * 2
    assert seen == [(2, 2)] * 2


@pytest.mark.parametrize("version", [1, 2])
def test_an_engine_that_fails_once_gets_the_version_again_and_the_others_do_not(resyncs, version):
    engines = [Engine("engine 0"), unlike("engine 1"), Engine("engine 2")]
    engines[1].fails_at = ("receive", version)
    resync = resyncs(engines, timeout_s=2.0)
    for number in (1, 2):
        report = resync.run(number)
        assert (report.failed_engines, report.mismatching) == ({}, ())
    assert [engine.calls.count("receive") for engine in engines] == [2, 3, 2]
    assert [engine.calls.count("begin") for engine in engines] == [2, 3, 2]
    assert [engine.calls.count("end") for engine in engines] == [2, 2, 2]
    assert [engine.calls.count("kept") for engine in engines] == [1, 1, 1]


def test_an_engine_that_was_to_be_fed_by_one_that_fails_gets_the_version_again_with_it(resyncs):
    engines = [Engine("engine 0"), Engine("engine 1"), unlike("engine 2")]
    engines[0].fails_at = ("receive", 2)
    resync = resyncs(engines)
    for number in (1, 2):
        report = resync.run(number)
        assert (report.failed_engines, report.mismatching) == ({}, ())
    assert [engine.calls.count("receive") for engine in engines] == [3, 3, 2]
    assert [engine.calls.count("end") for engine in engines] == [2, 2, 2]


@pytest.mark.parametrize("number", [0, 1])
def test_an_engine_that_fails_twice_is_out_and_the_others_complete(resyncs, number):
    class Refusing(Engine):
        def receive(self, group, model, version):
            self.leave()
            raise EngineError(f"{self.name}: refused")

    engines = [Engine("engine 0"), unlike("engine 1")]
    engines[number] = Refusing(f"engine {number}")
    engines[number].cuts_rows = number == 1
    source, other = Source(weights()), engines[1 - number]
    resync = resyncs(engines, source, timeout_s=1.0)
    report = resync.run(7)
    assert report.failed_engines == {f"engine {number}": f"engine {number}: refused"}
    assert (report.mismatching, report.verified_tensors) == ((), len(source.weights))
    assert_loaded(other, source.weights)
    assert (other.version, other.calls.count("receive"), other.calls.count("end")) == (7, 1, 1)
    assert not {"end", "version", "resume"} & set(engines[number].calls)
    engines[number] = Engine(f"engine {number}")
    resync.use(engines)
    source.weights = weights(8)
    report = resync.run(8)
    assert (report.failed_engines, report.mismatching) == ({}, ())
    assert_loaded(engines[number], source.weights)


def test_an_engine_that_falls_silent_while_it_receives_is_out_and_holds_up_none_of_the_others(resyncs):
    over = threading.Event()

    class Silent(Engine):
        def receive(self, group, model, version):
            over.wait(30)

        def probe(self, timeout_s):
            raise EngineError(f"{self.name}: no answer")

    came = {}

    class Timed(Engine):
        def receive(self, *given):
            counts = super().receive(*given)
            came[self.name] = time.monotonic() - start
            return counts

    engines = [Silent("engine 0"), Timed("engine 1")]
    engines[1].cuts_rows = True
    resync = resyncs(engines, timeout_s=1.5)
    start = time.monotonic()
    try:
        report = resync.run(1)
    finally:
        over.set()
    assert set(report.failed_engines) == {"engine 0"}
    assert report.failed_engines["engine 0"].endswith("engine 0: no answer")
    assert report.mismatching == ()
    assert engines[1].calls.count("receive") == 1
    assert came["engine 1"] < 1


def test_an_end_that_fails_is_called_again_and_for_no_other_engine(resyncs):
    engines = [Engine("engine 0"), unlike("engine 1")]
    engines[0].fails_at = ("end", 1)
    report = resyncs(engines).run(1)
    assert (report.failed_engines, report.mismatching) == ({}, ())
    assert [engine.calls.count("end") for engine in engines] == [2, 1]
    assert [engine.calls.count("receive") for engine in engines] == [1, 1]


@pytest.mark.parametrize(("other", "joins"), [(unlike, 1), (Engine, 2)])
def test_an_engine_in_another_s_place_has_a_new_group_and_those_it_does_not_feed_keep_theirs(resyncs, other, joins):
    engines = [Engine("engine 0"), other("engine 1")]
    source = Source(weights())
    resync = resyncs(engines, source)
    assert resync.run(1).mismatching == ()
    names = [engine.receiver.name for engine in engines]
    engines[0] = Engine("engine 0")
    resync.use(engines)
    source.weights = weights(2)
    report = resync.run(2)
    assert (report.mismatching, report.failed_engines) == ((), {})
    assert [engine.calls.count("join") for engine in engines] == [1, joins]
    assert [engine.calls.count("receive") for engine in engines] == [1, 2]
    assert engines[0].receiver.name != names[0]
    assert (engines[1].receiver.name == names[1]) is (joins == 1)
    assert len({engine.receiver.name for engine in engines}) == 2
    assert [engine.calls.count("kept") for engine in engines] == [1, 1]


def test_engines_that_go_and_come_are_planned_for_anew(resyncs):
    engines = [Engine(f"engine {number}") for number in range(3)]
    source = Source(weights())
    resync = resyncs(engines[:2], source)
    for version, some in ((1, engines[:2]), (2, engines[1:]), (3, engines)):
        resync.use(some)
        source.weights = weights(version)
        report = resync.run(version)
        assert (report.mismatching, report.failed_engines) == ((), {})
        assert set(report.received_per_rank) == {engine.name for engine in some}
        for engine in some:
            assert_loaded(engine, source.weights)


def test_engines_that_change_places_are_planned_for_anew(resyncs):
    """A chain's plan names engines by their place."""
    source, engines = Source(weights()), [Engine("engine 0"), Engine("engine 1")]
    resync = resyncs(engines, source)
    resync.run(1)
    resync.use(engines[::-1])
    source.weights = weights(2)
    report = resync.run(2)
    assert (report.failed_engines, report.mismatching) == ({}, ())
    for engine in engines:
        assert_loaded(engine, source.weights)


def test_a_tensor_that_an_engine_lacks_is_named_before_anything_is_sent(resyncs):
    keeps = weights()
    del keeps["w3"]
    engines = [Engine("engine 0"), Engine("engine 1", keeps)]
    with pytest.raises(ResyncError, match=r"version 1 failed before .*: engine 1: no such tensor in its model: w3"):
        resyncs(engines).run(1)
    assert not any({"join", "receive", "resume"} & set(engine.calls) for engine in engines)


def test_a_row_that_does_not_fit_into_the_config_s_buffers_is_named_with_the_key(resyncs):
    with pytest.raises(ResyncError, match=r"resync.bucket_bytes: one row of w0 has 12 bytes"):
        resyncs([Engine("engine 0")], bucket_bytes=20).run(1)


def test_with_all_engines_lost_the_error_names_them_and_a_later_version_goes_to_others(resyncs):
    class Refusing(Engine):
        def receive(self, group, model, version):
            self.leave()
            raise EngineError(f"{self.name}: refused")

    engines = [Refusing("engine 0"), Refusing("engine 1")]
    resync = resyncs(engines, timeout_s=0.7)
    with pytest.raises(ResyncError, match=r"version 1 failed while it was sent: engine 0: refused; engine 1: refused"):
        resync.run(1)
    assert not any({"end", "version", "resume"} & set(engine.calls) for engine in engines)
    others = [Engine("engine 0"), Engine("engine 1")]
    resync.use(others)
    assert resync.run(1).mismatching == ()


def test_a_tensor_that_arrived_wrong_is_named_with_its_engine(resyncs):
    class Corrupting(Engine):
        def end_update(self):
            super().end_update()
            self.loaded["w2"][3, 3] += 1

    engines = [Engine("engine 0"), Corrupting("engine 1")]
    report = resyncs(engines).run(1)
    assert report.mismatching == ("engine 1: w2",)
    assert not any("resume" in engine.calls for engine in engines)


def test_the_draft_model_gets_its_own_tensors(resyncs):
    class WithDraft(Source):
        def layout(self):
            layout = list(super().layout().items())
            return dict(layout[:-2] + [(replace(spec, mtp=True), pieces) for spec, pieces in layout[-2:]])

    class Drafting(Engine):
        def draft_fingerprints(self, names):
            return {name: fingerprint(self.loaded[name]) for name in names}

    source, engines = WithDraft(weights()), [Drafting("engine 0"), Drafting("engine 1")]
    for engine in engines:
        engine.drafts = ("w4", "w5")
    report = resyncs(engines, source).run(1)
    assert (report.mismatching, report.verified_tensors) == ((), 12)
    assert report.received_per_rank == {engine.name: (nbytes(source.weights),) for engine in engines}
    assert [engine.calls.count("receive") for engine in engines] == [2, 2]
    for engine in engines:
        assert_loaded(engine, source.weights)


@pytest.fixture
def threads(monkeypatch):
    threads = ThreadDist(4)
    monkeypatch.setattr(ranks, "dist", threads)
    yield threads
    assert threads.left == threads.made


def elsewhere(name, keeps=None):
    engine = Engine(name, random_weights() if keeps is None else keeps)
    engine.place = EnginePlace(name=name, nodes=("x",))
    return engine


def sent(threads, engines, versions=((1, 0),), timeout_s=10.0, **options):
    try:
        return resynced(threads, engines, over_p2p(bucket_bytes=300, timeout_s=timeout_s), versions, **options)
    finally:
        for engine in engines:
            engine.leave()


@pytest.mark.parametrize("num_engines", [1, 2, 6])
def test_four_ranks_send_what_each_holds_and_share_the_rest(threads, num_engines):
    engines = [elsewhere(f"engine {number}") for number in range(num_engines)]
    results = sent(threads, engines, ((1, 1), (2, 2)))
    assert results[1:] == [[None, None]] * 3
    for report in results[0]:
        assert (report.mismatching, report.failed_engines) == ((), {})
        assert report.verified_tensors == num_engines * len(SHAPES)
        assert report.received_per_rank == {engine.name: (report.bytes,) for engine in engines}
        # Six engines of one rank each, for four ranks, are three chains of two.
        assert sum(report.sent_per_rank) == report.bytes * min(num_engines, 3)
        assert min(report.sent_per_rank) > 0
    for engine in engines:
        assert_loaded(engine, random_weights(2))
        assert engine.calls.count("join") == 1


@pytest.mark.parametrize("block", [(4, 4), (2, 4), (3, 3)])
def test_what_ranks_quantise_is_that_of_the_whole_matrices(threads, block):
    transform = Quantize(BlockFp8(block=block), ["rows", "columns"])
    expected = random_weights()
    for name in ("rows", "columns"):
        expected[name], expected[f"{name}_scale_inv"] = quantize(random_weights()[name], block)
    engines = [elsewhere(f"engine {number}", expected) for number in range(2)]
    results = sent(threads, engines, transform=lambda _: transform)
    assert (results[0][0].mismatching, results[0][0].failed_engines) == ((), {})
    for engine in engines:
        assert_loaded(engine, expected)


def test_what_ranks_round_to_fp8_is_that_of_the_whole_matrices(threads):
    transform = RoundToFp8(BlockFp8(block=(3, 3)), ["rows"])
    engine = elsewhere("engine 0")
    results = sent(threads, [engine], transform=lambda _: transform)
    assert results[0][0].mismatching == ()
    rows = random_weights()["rows"]
    assert_loaded(engine, random_weights() | {"rows": dequantize(*quantize(rows, (3, 3)), rows.dtype, (3, 3))})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_matrix_that_cannot_be_quantised_fails_the_version_on_every_rank_before_anything_is_sent(threads, value):
    def spoilt(seed=0):
        tensors = random_weights(seed)
        tensors["rows"][7, 3] = value
        return tensors

    keeps = random_weights()
    keeps["rows"], keeps["rows_scale_inv"] = quantize(keeps["rows"], (3, 3))
    engine = elsewhere("engine 0", keeps)
    transform = Quantize(BlockFp8(block=(3, 3)), ["rows"])
    results = sent(threads, [engine], weights=spoilt, transform=lambda _: transform)
    for (error,) in results:
        assert str(error).startswith("resync of version 1 failed quantising: rows: " + NOT_FINITE)
    assert not {"receive", "resume"} & set(engine.calls)


def test_an_engine_that_fails_once_and_one_that_fails_twice_among_four_ranks(threads):
    class Refusing(Engine):
        def receive(self, group, model, version):
            self.leave()
            raise EngineError(f"{self.name}: refused")

    engines = [elsewhere(f"engine {number}") for number in range(3)]
    engines[1].fails_at = ("receive", 1)
    engines[2] = Refusing("engine 2", random_weights())
    results = sent(threads, engines, timeout_s=2.0)
    report = results[0][0]
    assert report.failed_engines == {"engine 2": "engine 2: refused"}
    assert report.mismatching == ()
    assert [engine.calls.count("receive") for engine in engines[:2]] == [1, 2]
    for engine in engines[:2]:
        assert_loaded(engine, random_weights())
        assert engine.calls[-1] == "resume"


def test_a_rank_without_memory_fails_the_version_on_every_rank(threads, monkeypatch):
    original = EngineSender._slot

    def no_memory(sender, turn):
        if sender._rank == 2:
            raise OSError("no memory for 7 bytes to send")
        return original(sender, turn)

    monkeypatch.setattr(EngineSender, "_slot", no_memory)
    engine = elsewhere("engine 0")
    start = time.monotonic()
    results = sent(threads, [engine])
    assert time.monotonic() - start < 5
    for (error,) in results:
        assert "resync of version 1 failed while it was sent: " in str(error)
        assert "no memory for 7 bytes to send" in str(error)
    assert "resume" not in engine.calls
