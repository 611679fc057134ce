"""What a written file goes through before its record is written: the disk, then the check, and none after a failure."""

import os

import pytest
import xxhash
from slimrl_tools.convert import flush_and_verify as module
from slimrl_tools.convert.flush_and_verify import FlushAndVerify

from slimrl.checkpoints.digests import Span

DIGEST_OF_ZEROS = xxhash.xxh3_128_hexdigest(bytes(100))


def span(start: int) -> Span:
    return Span(name=f"t{start}", start=start, length=100, digest=DIGEST_OF_ZEROS)


def test_spans_are_checked_while_the_file_is_written_and_its_record_comes_last(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "STEP_BYTES", 100)
    file, events = tmp_path / "f", []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (events.append("disk"), real(descriptor)))
    with FlushAndVerify(events.append) as flush_and_verify:
        with file.open("w+b", buffering=0) as stream:
            for start in range(0, 500, 100):
                stream.write(bytes(100))
                flush_and_verify.written(stream.fileno(), file, span(start))
        flush_and_verify.finish(file, lambda: events.append("record"))
    assert events[0] == "disk"
    assert events[-1] == "record"
    assert events.count(100) == 5
    assert events.count("disk") > 1


@pytest.mark.parametrize("step_bytes", [100, 10**9])
def test_a_span_that_differs_is_raised_and_neither_its_file_nor_a_later_one_is_recorded(
    tmp_path, monkeypatch, step_bytes
):
    monkeypatch.setattr(module, "STEP_BYTES", step_bytes)
    records = []

    def write_two(flush_and_verify):
        for name in "ab":
            file = tmp_path / name
            with file.open("w+b", buffering=0) as stream:
                stream.write(b"x" + bytes(199) if name == "a" else bytes(200))
                for start in (0, 100):
                    flush_and_verify.written(stream.fileno(), file, span(start))
            flush_and_verify.finish(file, lambda name=name: records.append(name))

    with (
        pytest.raises(OSError, match="a: t0 reads back differently"),
        FlushAndVerify(lambda _: None) as flush_and_verify,
    ):
        write_two(flush_and_verify)
    assert records == []
    with FlushAndVerify(None) as unchecked:
        write_two(unchecked)
    assert records == ["a", "b"]


def test_a_failure_is_raised_when_a_later_file_is_finished_and_does_not_wait_for_the_end(tmp_path, monkeypatch):
    def fails(_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fails)
    file = tmp_path / "f"
    file.write_bytes(bytes(100))
    flush_and_verify = FlushAndVerify(None)
    flush_and_verify.finish(file, lambda: None)
    # Steps are taken one by one.
    flush_and_verify._check.submit(int).result()
    with pytest.raises(OSError, match="Input/output error"):
        flush_and_verify.finish(file, lambda: None)
    with pytest.raises(OSError, match="Input/output error"), flush_and_verify:
        pass
