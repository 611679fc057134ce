"""Resyncs in which an engine, the disk or the version is not as it should be."""

import threading

import pytest
import torch
from resync_engines import Engine, MemoryTransport, Source, config, session, weights

from slimrl import device
from slimrl.config.schema.resync import TransportName
from slimrl.data.engine import EngineError
from slimrl.resync import engine_calls
from slimrl.resync.engine_calls import EnginesFailed
from slimrl.resync.session import ResyncError

pytestmark = pytest.mark.skipif(device.device_type() == "cuda", reason="the engines here map host memory")


def test_an_engine_that_fails_once_gets_another_chance_and_the_version_starts_again():
    engines = [Engine("engine 0"), Engine("engine 1")]
    engines[1].fails_at = ("load", 2)
    resync = session(Source(weights()), engines, config())
    report = resync.run(7)
    resync.close()
    assert report.failed_engines == {}
    assert report.mismatching == ()
    for engine in engines:
        # The first attempt ends with the second bucket; up to two others may be under way by then.
        assert engine.calls.count("load") - report.buckets in (2, 3, 4)
        assert engine.calls.count("begin") == 2
        assert engine.calls.count("version") == engine.calls.count("resume") == 1


@pytest.mark.parametrize("transport", [TransportName.ipc, TransportName.p2p])
@pytest.mark.usefixtures("in_process_store")
def test_an_engine_that_still_loads_when_another_fails_is_not_taken_for_dead(monkeypatch, transport):
    monkeypatch.setattr(engine_calls, "PROBE_TIMEOUT_S", 0.05)
    engines = [Engine("engine 0"), Engine("engine 1")]
    engines[0].load_s = 0.2
    engines[1].fails_at = ("load" if transport is TransportName.ipc else "receive", 1)
    engines[1].cuts_rows = True
    settings = config(transport=transport, bucket_bytes=400, timeout_s=3.0)
    resync = session(Source(weights()), engines, settings, run_id=f"busy-{transport.value}")
    report = resync.run(1)
    resync.close()
    assert report.buckets > 1
    assert report.failed_engines == {}
    assert report.mismatching == ()


def test_a_failed_call_counts_beside_one_to_an_engine_that_died():
    refusing, dying, other = (Engine(f"engine {i}") for i in range(3))
    dying.loading.acquire()
    taking_part = engine_calls.EngineCalls([refusing, dying, other], 0.05)
    assert taking_part.judge(EnginesFailed({"engine 0": "refused", "engine 1": "late"}))
    assert list(taking_part.failed) == ["engine 1"]
    assert taking_part.judge(EnginesFailed({"engine 0": "refused again"}))
    assert taking_part.failed["engine 0"] == "refused again"
    assert taking_part.engines == [other]


def test_an_engine_that_dies_is_named_before_what_others_say_of_it():
    dying, other = Engine("engine 0"), Engine("engine 1")
    dying.loading.acquire()
    taking_part = engine_calls.EngineCalls([dying, other], 0.05)
    assert taking_part.judge(EngineError("message to member 1: connection reset"))
    assert list(taking_part.failed) == ["engine 0"]
    assert taking_part.failed["engine 0"] == "engine 0: no answer within 0.05 s; message to member 1: connection reset"


def test_an_engine_that_fails_twice_is_out_and_the_others_get_the_version():
    class Refusing(Engine):
        def load_round(self, model, number, slot):
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

        def load_round(self, model, number, slot):
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
        def load_round(self, model, number, slot):
            raise EngineError(f"{self.name}: load: refused")

    engine = Refusing("engine 0")
    resync = session(Source(weights()), [engine], config())
    with pytest.raises(ResyncError, match=r"version 7 failed at round 1 of \d+: engine 0: load: refused"):
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
        with pytest.raises(ValueError, match=f"version {version}: version 3 has been sent already"):
            resync.run(version)
    resync.close()
    assert engine.calls == calls


def test_a_full_disk_names_itself_and_engines_stay_paused():
    class Full(MemoryTransport):
        def send(self, parts, buffer):
            raise OSError(28, "No space left on device")

    engine = Engine("engine 0")
    resync = session(Source(weights()), [engine], config(), transport=Full())
    with pytest.raises(ResyncError, match=r"version 1 failed at bucket 1 .*No space left"):
        resync.run(1)
    resync.close()
    assert engine.calls == ["pause", "begin"]


def test_an_engine_that_hangs_runs_into_the_deadline_and_is_out():
    over = threading.Event()

    class Hanging(Engine):
        def pause(self, mode):
            over.wait(30)

        def probe(self, timeout_s):
            over.wait(30)

    engines = [Engine("engine 0"), Hanging("engine 1")]
    resync = session(Source(weights()), engines, config(timeout_s=0.3))
    report = resync.run(1)
    resync.close()
    over.set()
    assert set(report.failed_engines) == {"engine 1"}
    assert "pause did not finish within 0.3 s" in report.failed_engines["engine 1"]


def test_a_tensor_whose_fingerprint_an_engine_does_not_give_counts_as_one_that_differs():
    class Silent(Engine):
        def fingerprints(self, names):
            return {name: value for name, value in super().fingerprints(names).items() if name != "w3"}

    engines = [Engine("engine 0"), Silent("engine 1")]
    resync = session(Source(weights()), engines, config())
    report = resync.run(1)
    resync.close()
    assert report.mismatching == ("engine 1: w3",)
    assert not any("resume" in engine.calls for engine in engines)
