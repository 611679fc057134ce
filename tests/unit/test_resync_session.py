"""A resync against engines that live in this process: order, contents and verification."""

import os
import threading
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from resync_engines import Engine, MemoryTransport, Source, config, session, weights

from slimrl import device
from slimrl.config.schema.resync import PauseMode, VerifyMode
from slimrl.data.engine import EngineError
from slimrl.models.fingerprint import fingerprint
from slimrl.quantization.fp8 import BlockFp8
from slimrl.resync.engine_calls import EnginesFailed, SendThread, fan_out
from slimrl.resync.expected_fingerprints import ExpectedFingerprints, verified_names
from slimrl.resync.ipc.shared_buffer import SHARED_MEMORY_DIR
from slimrl.resync.ranks import RankError, Ranks
from slimrl.resync.report import Clock, ResyncError, SendClock
from slimrl.resync.transform import Quantize

pytestmark = pytest.mark.skipif(device.device_type() == "cuda", reason="the engines here map host memory")


def test_engines_hold_the_source_s_bytes_under_the_new_version():
    source, engines = Source(weights()), [Engine("engine 0"), Engine("engine 1")]
    resync = session(source, engines, config(), run_id="contents")
    seen = []
    try:
        for version in (3, 4):
            source.weights = weights(version)
            report = resync.run(version, on_progress=lambda done, total: seen.append((done, total)))
            assert report.version == version
            assert report.mismatching == ()
            assert report.bytes == sum(t.numel() * t.element_size() for t in source.weights.values())
            assert report.verified_tensors == 2 * len(source.weights)
            for engine in engines:
                assert engine.version == version
                assert set(engine.loaded) == set(source.weights)
                for name, tensor in source.weights.items():
                    assert torch.equal(engine.loaded[name].view(torch.uint8), tensor.view(torch.uint8))
    finally:
        resync.close()
    assert seen == [(i, report.buckets) for i in range(1, report.buckets + 1)] * 2
    assert report.buckets > 2


def test_an_engine_is_told_in_order_and_served_again_last():
    engine = Engine("engine 0")
    resync = session(Source(weights()), [engine], config())
    report = resync.run(1)
    resync.close()
    loads = ["load"] * report.buckets
    assert engine.calls == [
        "pause",
        "begin",
        "kept",
        "map",
        *loads,
        "end",
        "flush",
        "version",
        "fingerprints",
        "resume",
    ]


def test_a_tensor_that_arrived_wrong_is_named_with_its_engine():
    class Corrupting(Engine):
        def end_update(self):
            super().end_update()
            self.loaded["w2"][3, 3] += 1

    engines = [Engine("engine 0"), Corrupting("engine 1")]
    resync = session(Source(weights()), engines, config())
    report = resync.run(1)
    resync.close()
    assert report.mismatching == ("engine 1: w2",)
    assert ["resume" in engine.calls for engine in engines] == [False, False]


class SourceWithDraft(Source):
    """Its last two weights are those of a layer for multi-token prediction."""

    def layout(self):
        layout = list(super().layout().items())
        return dict(layout[:-2] + [(replace(spec, mtp=True), pieces) for spec, pieces in layout[-2:]])


class DraftingEngine(Engine):
    def draft_fingerprints(self, names):
        self._note(f"drafts {' '.join(names)}")
        return {name: fingerprint(self.loaded[name]) for name in names}


def test_the_draft_model_answers_for_its_own_tensors():
    source, engine = SourceWithDraft(weights()), DraftingEngine("engine 0")
    engine.drafts = ("w4", "w5")
    engine.fingerprints = lambda names: {name: fingerprint(engine.loaded[name]) for name in names[:-1]}
    resync = session(source, [engine], config(), run_id="drafts")
    try:
        report = resync.run(1)
    finally:
        resync.close()
    assert (report.verified_tensors, report.mismatching) == (6, ("engine 0: w3",))
    assert "drafts w4 w5" in engine.calls


def test_no_engine_serves_a_version_that_arrived_wrong_on_another_node(monkeypatch: pytest.MonkeyPatch):
    engine = Engine("engine 0")
    resync = session(Source(weights()), [engine], config())
    agree = resync._ranks.agree

    def worst(verdict: int) -> int:
        """Another rank finds wrong weights in its own engines."""
        return max(agree(verdict), int("fingerprints" in engine.calls))

    monkeypatch.setattr(resync._ranks, "agree", worst)
    assert resync.run(1).mismatching == ()
    resync.close()
    assert "fingerprints" in engine.calls
    assert "resume" not in engine.calls


def test_a_version_that_arrived_wrong_can_be_sent_again():
    class CorruptingOnce(Engine):
        def end_update(self):
            super().end_update()
            if self.calls.count("end") == 1:
                self.loaded["w2"][3, 3] += 1

    engine = CorruptingOnce("engine 0")
    resync = session(Source(weights()), [engine], config())
    assert [resync.run(1).mismatching for _ in range(2)] == [("engine 0: w2",), ()]
    resync.close()
    assert engine.calls.count("resume") == 1


def test_ranks_and_engines_hash_at_the_same_time(monkeypatch: pytest.MonkeyPatch):
    both = threading.Barrier(2, timeout=10)

    class Meeting(Engine):
        def fingerprints(self, names):
            both.wait()
            return super().fingerprints(names)

    of_ranks = ExpectedFingerprints.fingerprints
    monkeypatch.setattr(ExpectedFingerprints, "fingerprints", lambda *given: (both.wait(), of_ranks(*given))[1])
    resync = session(Source(weights()), [Meeting("engine 0")], config())
    assert resync.run(1).mismatching == ()
    resync.close()


def test_a_rank_that_died_is_reported_while_an_engine_still_hashes(monkeypatch: pytest.MonkeyPatch):
    asked, reported = threading.Event(), threading.Event()

    class Slow(Engine):
        def fingerprints(self, names):
            asked.set()
            assert reported.wait(10)
            return super().fingerprints(names)

    def died(*_):
        assert asked.wait(10)
        raise RankError("rank 1 died")

    monkeypatch.setattr(ExpectedFingerprints, "fingerprints", died)
    resync = session(Source(weights()), [Slow("engine 0")], config())
    start = time.monotonic()
    with pytest.raises(ResyncError, match="rank 1 died"):
        resync.run(1)
    assert time.monotonic() - start < 5
    reported.set()
    resync.close()


@pytest.mark.parametrize("transport", [None, MemoryTransport])
def test_other_engines_get_the_next_version_and_those_that_went_do_not(transport):
    engines = [Engine(f"engine {number}") for number in range(3)]
    source = Source(weights())
    resync = session(source, engines[:2], config(), run_id="others", transport=transport and transport())
    assert resync.run(1).mismatching == ()
    resync.use(engines[1:])
    source.weights = weights(2)
    report = resync.run(2)
    resync.close()
    assert (report.mismatching, report.failed_engines) == ((), {})
    assert [engine.version for engine in engines] == [1, 2, 2]
    assert all(torch.equal(engines[2].loaded[name], tensor) for name, tensor in source.weights.items())


def test_what_was_gathered_wrongly_and_then_quantised_is_named_and_nobody_serves_it(monkeypatch: pytest.MonkeyPatch):
    original = Quantize.apply

    def spoils(self, bucket, gathered, *given):
        for part in bucket.gathered:
            part.view(gathered)[0, 0] += 1
        original(self, bucket, gathered, *given)

    monkeypatch.setattr(Quantize, "apply", spoils)
    engine = Engine("engine 0")
    transform = Quantize(BlockFp8(block=(4, 4)), ["w0", "w2"])
    source = Source({"w0": torch.randn(8, 5), "w2": torch.randn(4, 4)})
    settings = config(bucket_bytes=1000)
    resync = session(source, [engine], settings, transform=transform, transport=MemoryTransport())
    report = resync.run(1)
    resync.close()
    assert report.mismatching == ("gathering: w0", "gathering: w2")
    assert "resume" not in engine.calls


def test_a_bucket_is_gathered_while_the_one_before_is_loaded():
    loading, overlapped = threading.Event(), []

    class Slow(Engine):
        def load_round(self, model, number, slot):
            loading.set()
            time.sleep(0.05)
            super().load_round(model, number, slot)
            loading.clear()

    class Watched(Source):
        def groups(self, name):
            overlapped.append(loading.wait(0.04))
            return super().groups(name)

    resync = session(Watched(weights()), [Slow("engine 0")], config(verify=VerifyMode.off))
    report = resync.run(1)
    resync.close()
    assert report.buckets > 2
    assert any(overlapped)


def test_requests_that_go_on_in_place_are_counted_as_stale_and_not_flushed():
    engines = [Engine("engine 0"), Engine("engine 1")]
    engines[1].running = 3
    resync = session(Source(weights()), engines, config(pause=PauseMode.in_place))
    report = resync.run(1)
    resync.close()
    assert report.stale_requests == 3
    assert ["flush" in engine.calls for engine in engines] == [True, False]


def test_caches_are_kept_where_the_recipe_says_so():
    engine = Engine("e")
    assert session(Source(weights()), [engine], config(flush_cache=False, pause=PauseMode.abort)).run(1) is not None
    assert "version" in engine.calls
    assert "flush" not in engine.calls


def test_seconds_without_verification_contain_flush_and_version():
    class Slow(Engine):
        def flush_cache(self):
            time.sleep(0.2)

        def set_version(self, version):
            time.sleep(0.1)

        def fingerprints(self, names):
            time.sleep(0.4)
            return super().fingerprints(names)

    resync = session(Source(weights()), [Slow("engine 0")], config())
    report = resync.run(1)
    resync.close()
    assert 0.3 < report.stage_seconds["activate"] < 0.4
    assert 0.4 < report.stage_seconds["verify"] < 0.6
    assert 0.3 < report.transfer_seconds == report.seconds - report.stage_seconds["verify"]


@pytest.mark.parametrize(
    ("tensors", "nbytes", "shares"),
    # The last three: small models, of which a share is at least 100 bytes.
    [(23, 10**6, 4), (4, 10**6, 4), (3, 10**6, 4), (23, 299, 2), (23, 199, 1), (23, 1, 1)],
)
def test_sampling_compares_every_tensor_once_in_the_stated_number_of_versions(tensors, nbytes, shares):
    names = [f"w{i}" for i in range(tensors)]
    settings = config(verify=VerifyMode.sampled, sampled_versions=4, sampled_bytes=100)
    for first in range(9):
        window = [verified_names(names, nbytes, settings, version) for version in range(first, first + shares)]
        assert sorted(name for sample in window for name in sample) == sorted(names)
        assert max(map(len, window)) - min(map(len, window)) <= 1


def test_verification_can_be_off():
    engine = Engine("engine 0")
    resync = session(Source(weights()), [engine], config(verify=VerifyMode.off))
    report = resync.run(1)
    resync.close()
    assert report.verified_tensors == 0
    assert "fingerprints" not in engine.calls


def test_the_segment_is_gone_after_close():
    before = set(SHARED_MEMORY_DIR.glob(f"slimrl-*-{os.getpid()}-*"))
    resync = session(Source(weights()), [Engine("engine 0")], config())
    resync.run(1)
    assert set(SHARED_MEMORY_DIR.glob(f"slimrl-*-{os.getpid()}-*")) > before
    resync.close()
    resync.close()
    assert set(SHARED_MEMORY_DIR.glob(f"slimrl-*-{os.getpid()}-*")) == before


def test_fan_out_keeps_the_order_of_its_calls_and_runs_them_at_once():
    barrier = threading.Barrier(3, timeout=5)

    def call(value):
        barrier.wait()
        return value

    calls = {f"engine {i}": lambda i=i: call(i) for i in range(3)}
    assert list(fan_out(calls, "call", 10).items()) == [("engine 0", 0), ("engine 1", 1), ("engine 2", 2)]


def test_the_deadline_of_a_fan_out_is_one_for_all_however_many_answer_before_it():
    ended = threading.Event()
    calls = {f"engine {i}": lambda i=i: ended.wait(0.15 * i if i < 5 else 20) for i in range(1, 6)}
    with pytest.raises(EnginesFailed, match="engine 5: call did not finish within") as caught:
        fan_out(calls, "call", 0.3)
    ended.set()
    # The fourth answers within 0.3 s of the third.
    assert {"engine 4", "engine 5"} <= caught.value.failures.keys()


def test_what_an_engine_failed_of_is_told_where_another_is_late():
    ended = threading.Event()

    def refuse():
        raise EngineError("engine 1: no memory is left")

    with pytest.raises(EnginesFailed) as caught:
        fan_out({"engine 1": refuse, "engine 2": lambda: ended.wait(20)}, "load", 0.2)
    ended.set()
    assert caught.value.failures == {
        "engine 1": "engine 1: no memory is left",
        "engine 2": "engine 2: load did not finish within 0.2 s",
    }


def test_sends_that_overlap_are_counted_once():
    clock = Clock()
    send_clock = SendClock(clock)
    first_begun = threading.Event()
    times = []

    def first():
        times.append(time.perf_counter())
        first_begun.set()
        time.sleep(0.2)

    def second():
        first_begun.wait()
        time.sleep(0.3)
        times.append(time.perf_counter())

    sendings = [SendThread(partial(send_clock.run, send)) for send in (first, second)]
    assert [sending.wait(5) for sending in sendings] == [None, None]
    assert clock.seconds["send"] == pytest.approx(times[1] - times[0], abs=0.05)


def test_a_send_that_comes_after_one_that_failed_is_not_begun():
    def refuse():
        raise EngineError("refused")

    begun = []
    first = SendThread(refuse)
    second = SendThread(lambda: begun.append(True), after=first)
    assert [str(sending.wait(5)) for sending in (first, second)] == ["refused", "refused"]
    assert begun == []


@pytest.mark.parametrize("quantises", [False, True])
def test_what_is_queued_on_the_device_is_done_before_ranks_agree_that_a_bucket_is_whole(monkeypatch, quantises):
    """Then the others write the next bucket where this one is read from, and engines read what was made of it."""
    queued, open_at_agreements = set(), []

    class Copied(Source):
        def groups(self, name):
            queued.add(name)
            return super().groups(name)

    class Watched(Quantize):
        def apply(self, *given):
            queued.add("transform")
            super().apply(*given)

    def agree(ranks, verdict):
        open_at_agreements.append(set(queued))
        return verdict

    monkeypatch.setattr(device, "finish_queued_work", queued.clear)
    monkeypatch.setattr(Ranks, "agree", agree)
    options = {}
    if quantises:
        options = {"transform": Watched(BlockFp8(block=(4, 4)), ["w2"]), "transport": MemoryTransport()}
    settings = config(verify=VerifyMode.off)
    resync = session(Copied(weights()), [Engine("engine 0")], settings, **options)
    report = resync.run(1)
    resync.close()
    assert len(open_at_agreements) > 2 * report.buckets > 2
    assert not any(open_at_agreements)
