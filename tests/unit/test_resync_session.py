"""A resync against engines that live in this process: order, contents, verification, and engines that fail."""

import os
import threading
import time
from functools import partial
from math import ceil

import pytest
import torch

from slimrl import device
from slimrl.config.schema import PauseMode, ResyncConfig, TransportName, VerifyMode
from slimrl.data.protocols import EngineError, EnginePlace, SourcePiece, SourceTensor, TensorSpec
from slimrl.models.broadcast_group import GroupError
from slimrl.models.fingerprint import fingerprint
from slimrl.models.shared_segment import SHARED_MEMORY_DIR
from slimrl.resync import fleet
from slimrl.resync.expectation import verified_names
from slimrl.resync.fan_out import EnginesFailed, fan_out
from slimrl.resync.report import Clock
from slimrl.resync.sending import SendClock, Sending
from slimrl.resync.session import ResyncError, ResyncSession
from slimrl.resync.transports.collective import CollectiveTransport
from slimrl.resync.transports.ipc import IpcTransport
from slimrl.rollout.bucket_receiver import EngineReceivers

pytestmark = pytest.mark.skipif(device.device_type() == "cuda", reason="the engines here map host memory")


class Source:
    """Weights of a trainer of one rank."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.weights = tensors

    def specs(self):
        return [
            TensorSpec(name=name, shape=tuple(t.shape), dtype=str(t.dtype).removeprefix("torch."))
            for name, t in self.weights.items()
        ]

    def layout(self):
        return [
            SourceTensor(
                spec=spec,
                pieces=(SourcePiece(region=tuple(map(slice, [0] * len(spec.shape), spec.shape)), holders=(0,)),),
            )
            for spec in self.specs()
        ]

    def piece(self, name):
        return self.weights[name]

    def groups(self, name):
        return self.weights[name][None]


class OnlyRank:
    """Implements EngineRanks for an engine of one rank."""

    rank, per_node = 0, 1

    def exchange(self, value):
        return [value]


class Engine:
    """Keeps what it loads, and a log of what it was told."""

    def __init__(self, name: str) -> None:
        self.name, self.num_ranks = name, 1
        self.calls: list[str] = []
        self.loaded: dict[str, torch.Tensor] = {}
        self.version = -1
        self.fails_at: tuple[str, int] | None = None
        self.receivers = EngineReceivers(OnlyRank())
        self.place = EnginePlace(name=name, nodes=("",))
        self.running = 0
        self.load_s = 0.0
        self.loading = threading.Lock()

    def probe(self, timeout_s):
        """Answers between two loads, as SGLang does."""
        if not self.loading.acquire(timeout=timeout_s):
            raise EngineError(f"{self.name}: no answer within {timeout_s:g} s")
        self.loading.release()

    def running_requests(self):
        return self.running

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if self.fails_at is not None and (call, self.calls.count(call)) == self.fails_at:
            raise EngineError(f"{self.name}: {call}: refused")

    def pause(self, mode):
        self._note("pause")

    def begin_update(self):
        self._note("begin")

    def end_update(self):
        self._note("end")

    def flush_cache(self):
        self._note("flush")

    def set_version(self, version):
        self._note("version")
        self.version = version

    def resume(self):
        self._note("resume")

    def fingerprints(self, names):
        self._note("fingerprints")
        return {name: fingerprint(self.loaded[name]) for name in (self.loaded if names is None else names)}

    def load_shared_bucket(self, segment, bucket):
        self._note("load")
        data = (SHARED_MEMORY_DIR / segment).read_bytes()[: bucket.nbytes]
        self._take(torch.frombuffer(bytearray(data), dtype=torch.uint8), bucket)

    def open_receivers(self, group, first_rank):
        self._note("open")
        self.receivers.open_version(group, first_rank)

    def load_received(self, group, number, bucket):
        self._note("receive")
        try:
            self._take(self.receivers.bucket(group, number)[: bucket.nbytes], bucket)
        except GroupError as error:
            raise EngineError(f"{self.name}: {error}") from error
        self.receivers.all_loaded(number)

    def leave_group(self, group):
        self._note("leave")
        self.receivers.close()

    def _take(self, flat, bucket):
        with self.loading:
            time.sleep(self.load_s)
            self._keep(flat, bucket)

    def _keep(self, flat, bucket):
        for part in bucket.parts:
            dtype = getattr(torch, part.spec.dtype)
            value = flat[part.offset : part.offset + part.nbytes].clone().view(dtype).view(part.shape)
            if part.is_whole:
                self.loaded[part.spec.name] = value
                continue
            whole = self.loaded.setdefault(part.spec.name, torch.zeros(part.spec.shape, dtype=dtype))
            whole[part.start : part.stop] = value


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(7, 3), (64,), (5, 5), (2, 2, 2), (33,), (1,)]
    return {
        f"w{i}": torch.randn(shape, generator=generator).to(torch.bfloat16 if i % 2 else torch.float32)
        for i, shape in enumerate(shapes)
    }


def config(**changes) -> ResyncConfig:
    return ResyncConfig(**{"bucket_bytes": 160, "timeout_s": 20.0, "verify": VerifyMode.full, **changes})


def session(source, engines, settings, **changes) -> ResyncSession:
    return ResyncSession(source, engines, settings, **{"rank": 0, "run_id": "test", **changes})


@pytest.mark.parametrize("transport", [TransportName.ipc, TransportName.collective])
def test_engines_hold_the_source_s_bytes_under_the_new_version(transport):
    source, engines = Source(weights()), [Engine("engine 0"), Engine("engine 1")]
    resync = session(source, engines, config(transport=transport), run_id=f"contents-{transport.value}")
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


def test_one_group_serves_all_versions_and_a_new_one_other_engines():
    engines = [Engine("engine 0"), Engine("engine 1")]
    source = Source(weights())
    resync = session(source, engines, config(transport=TransportName.collective), run_id="groups")
    try:
        names = []
        for version in (1, 2, 3):
            if version == 3:
                engines[1] = Engine("engine 1")
                resync.use(engines)
            assert resync.run(version).mismatching == ()
            names.append({engine.receivers.group_name for engine in engines})
            assert len(names[-1]) == 1
        assert names[0] == names[1]
        assert names[1] != names[2]
    finally:
        resync.close()
    assert [engine.calls[-1] for engine in engines] == ["leave", "leave"]


def test_a_received_bucket_is_loaded_while_the_next_is_broadcast():
    """Loads that take 50 ms each, and a source that waits for one at every bucket but the first."""
    loading, overlapped = threading.Event(), []

    class Slow(Engine):
        def load_received(self, group, number, bucket):
            loading.set()
            time.sleep(0.05)
            super().load_received(group, number, bucket)
            loading.clear()

    class Watched(CollectiveTransport):
        def _broadcast(self, tensor):
            overlapped.append(loading.is_set())
            super()._broadcast(tensor)

    engine = Slow("engine 0")
    transport = Watched("127.0.0.1", "slimrl-overlap", 20.0, bucket_bytes=160)
    resync = session(Source(weights()), [engine], config(), transport=transport)
    report = resync.run(1)
    resync.close()
    assert report.buckets > 2
    assert report.mismatching == ()
    assert any(overlapped)


def test_an_engine_is_told_in_order_and_served_again_last():
    engine = Engine("engine 0")
    resync = session(Source(weights()), [engine], config())
    report = resync.run(1)
    resync.close()
    loads = ["load"] * report.buckets
    assert engine.calls == ["pause", "begin", *loads, "end", "flush", "version", "fingerprints", "resume"]


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


def test_an_engine_that_fails_once_gets_another_chance_and_the_version_starts_again():
    engines = [Engine("engine 0"), Engine("engine 1")]
    engines[1].fails_at = ("load", 2)
    resync = session(Source(weights()), engines, config())
    report = resync.run(7)
    resync.close()
    assert report.failed_engines == {}
    assert report.mismatching == ()
    for engine in engines:
        # Beside the refused bucket another one was under way, before or after it.
        assert engine.calls.count("load") - report.buckets in (3, 4)
        assert engine.calls.count("begin") == 2
        assert engine.calls.count("version") == engine.calls.count("resume") == 1


@pytest.mark.parametrize("transport", [TransportName.ipc, TransportName.collective])
def test_an_engine_that_still_loads_when_another_fails_is_not_taken_for_dead(monkeypatch, transport):
    monkeypatch.setattr(fleet, "PROBE_TIMEOUT_S", 0.05)
    engines = [Engine("engine 0"), Engine("engine 1")]
    engines[0].load_s = 0.2
    engines[1].fails_at = ("load" if transport is TransportName.ipc else "receive", 1)
    settings = config(transport=transport, bucket_bytes=400)
    resync = session(Source(weights()), engines, settings, run_id=f"busy-{transport.value}")
    report = resync.run(1)
    resync.close()
    assert report.buckets > 1
    assert report.failed_engines == {}
    assert report.mismatching == ()


def test_a_failed_call_counts_beside_one_to_an_engine_that_died():
    refusing, dying, other = (Engine(f"engine {i}") for i in range(3))
    dying.loading.acquire()
    taking_part = fleet.Fleet([refusing, dying, other], 0.05)
    assert taking_part.judge(EnginesFailed({"engine 0": "refused", "engine 1": "late"}))
    assert list(taking_part.failed) == ["engine 1"]
    assert taking_part.judge(EnginesFailed({"engine 0": "refused again"}))
    assert taking_part.failed["engine 0"] == "refused again"
    assert taking_part.engines == [other]


def test_an_engine_that_fails_twice_is_out_and_the_others_get_the_version():
    class Refusing(Engine):
        def load_shared_bucket(self, segment, bucket):
            self._note("load")
            raise EngineError(f"{self.name}: load: refused")

    engines = [Engine("engine 0"), Refusing("engine 1")]
    source = Source(weights())
    resync = session(source, engines, config())
    report = resync.run(7)
    assert report.failed_engines == {"engine 1": "engine 1: load: refused"}
    assert engines[0].version == 7
    assert engines[0].calls[-1] == "resume"
    assert "version" not in engines[1].calls
    assert "resume" not in engines[1].calls
    replaced = Engine("engine 1")
    resync.use([engines[0], replaced])
    assert resync.run(8).failed_engines == {}
    resync.close()
    assert replaced.version == 8
    assert all(torch.equal(replaced.loaded[name], tensor) for name, tensor in source.weights.items())


def test_an_engine_that_died_is_out_at_once():
    class Dying(Engine):
        dead = False

        def load_shared_bucket(self, segment, bucket):
            self.dead = True
            raise EngineError(f"{self.name}: load: connection refused")

        def probe(self, timeout_s):
            if self.dead:
                raise EngineError(f"{self.name}: gone")

    engines = [Dying("engine 0"), Engine("engine 1")]
    resync = session(Source(weights()), engines, config())
    report = resync.run(1)
    resync.close()
    assert report.failed_engines == {"engine 0": "engine 0: load: connection refused; engine 0: gone"}
    assert engines[1].version == 1
    assert engines[1].calls.count("begin") == 2


def test_with_no_engine_left_the_error_names_version_bucket_tensor_and_engine_and_nothing_resumes():
    class Refusing(Engine):
        def load_shared_bucket(self, segment, bucket):
            raise EngineError(f"{self.name}: load: refused")

    engine = Refusing("engine 0")
    resync = session(Source(weights()), [engine], config())
    with pytest.raises(ResyncError, match=r"version 7 failed at bucket 1 of \d \(w0\): engine 0: load: refused"):
        resync.run(7)
    assert "resume" not in engine.calls
    assert "version" not in engine.calls
    resync.use([Engine("engine 0")])
    assert resync.run(7).mismatching == ()
    resync.close()


@pytest.mark.parametrize("call", ["flush", "version", "fingerprints", "resume"])
def test_an_engine_that_fails_after_the_transfer_is_out_and_the_others_serve(call):
    engines = [Engine("engine 0"), Engine("engine 1")]
    engines[1].fails_at = (call, 1)
    resync = session(Source(weights()), engines, config())
    report = resync.run(1)
    resync.close()
    assert report.failed_engines == {"engine 1": f"engine 1: {call}: refused"}
    assert engines[0].calls[-1] == "resume"
    assert report.mismatching == ()


def test_a_version_that_is_not_newer_is_refused():
    engine = Engine("engine 0")
    resync = session(Source(weights()), [engine], config())
    resync.run(3)
    calls = list(engine.calls)
    for version in (3, 2):
        with pytest.raises(ValueError, match=f"version {version}: version 3 was sent before"):
            resync.run(version)
    resync.close()
    assert engine.calls == calls


def test_a_full_disk_names_itself_and_engines_stay_paused():
    class Full(IpcTransport):
        def send(self, bucket, buffer):
            raise OSError(28, "No space left on device")

    engine = Engine("engine 0")
    resync = session(Source(weights()), [engine], config(), transport=Full(5.0))
    with pytest.raises(ResyncError, match=r"version 1 failed at bucket 1 .*No space left"):
        resync.run(1)
    resync.close()
    assert engine.calls == ["pause", "begin"]


def test_a_refused_bucket_does_not_wait_for_its_deadline_and_the_version_starts_again_in_a_new_group():
    engines = [Engine("engine 0"), Engine("engine 1")]
    engines[0].fails_at = ("receive", 1)
    resync = session(Source(weights()), engines, config(transport=TransportName.collective), run_id="refused")
    start = time.monotonic()
    report = resync.run(1)
    assert time.monotonic() - start < 5
    resync.close()
    assert report.failed_engines == {}
    assert report.mismatching == ()
    assert [engine.calls.count("open") for engine in engines] == [2, 2]


def test_an_engine_that_hangs_runs_into_the_deadline_and_is_out():
    class Hanging(Engine):
        def pause(self, mode):
            threading.Event().wait(30)

        def probe(self, timeout_s):
            threading.Event().wait(30)

    engines = [Engine("engine 0"), Hanging("engine 1")]
    resync = session(Source(weights()), engines, config(timeout_s=0.3))
    report = resync.run(1)
    resync.close()
    assert set(report.failed_engines) == {"engine 1"}
    assert "pause did not finish within 0.3 s" in report.failed_engines["engine 1"]


def test_a_bucket_is_gathered_while_the_one_before_is_loaded():
    loading, overlapped = threading.Event(), []

    class Slow(Engine):
        def load_shared_bucket(self, segment, bucket):
            loading.set()
            time.sleep(0.05)
            super().load_shared_bucket(segment, bucket)
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


def test_sampling_reaches_every_tensor_within_the_stated_number_of_versions():
    names = [f"w{i}" for i in range(23)]
    settings = config(verify=VerifyMode.sampled, sampled_tensors=5)
    for first in range(40):
        window = range(first, first + ceil(len(names) / 5))
        assert frozenset().union(*(verified_names(names, settings, version) for version in window)) == set(names)
        assert len(verified_names(names, settings, first)) == 5


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


def test_sends_that_overlap_are_counted_once():
    clock = Clock()
    send_clock = SendClock(clock)
    first_begun = threading.Event()

    def first():
        first_begun.set()
        time.sleep(0.2)

    def second():
        first_begun.wait()
        time.sleep(0.3)

    start = time.perf_counter()
    sendings = [Sending(partial(send_clock.run, send)) for send in (first, second)]
    assert [sending.wait(5) for sending in sendings] == [None, None]
    assert clock.seconds["send"] == pytest.approx(time.perf_counter() - start, abs=0.05)


def test_a_send_that_comes_after_one_that_failed_is_not_begun():
    def refuse():
        raise EngineError("refused")

    begun = []
    first = Sending(refuse)
    second = Sending(lambda: begun.append(True), after=first)
    assert [str(sending.wait(5)) for sending in (first, second)] == ["refused", "refused"]
    assert begun == []
