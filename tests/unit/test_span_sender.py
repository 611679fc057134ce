"""Spans of recorded steps at an OTLP endpoint, and what a run does without one."""

import importlib.metadata
import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from slimrl.base.spans import SPANS
from slimrl.config.schema.recipe import Recipe
from slimrl.config.tracking_rules import EXPORTER, missing_trackers, tracking_violations
from slimrl.observability.profiling import span_sender
from slimrl.observability.profiling.recorder import STEP, Profiled, Recorder
from slimrl.observability.profiling.span_sender import SpanSender
from slimrl.observability.profiling.trace import Span, read_spans

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from otlp_receiver import otlp_receiver

from slimrl.observability.profiling.otlp import BATCH_SPANS, otel_spans


def record(
    folder: Path,
    url: str,
    said: list[str],
    steps: int = 2,
    *,
    profiled: Profiled | None = None,
    held: bool = False,
) -> float:
    """Record steps and send them; returns the seconds that the end took.

    Args:
        held: the sender's process is stopped until all steps have ended.
    """
    sender = SpanSender(url, "demo", folder / "logs" / "report.jsonl", said.append)
    if held:
        sender._process.send_signal(signal.SIGSTOP)
    recorder = Recorder(folder / "profile", profiled, sender)
    try:
        for number in range(1, steps + 1):
            with recorder.step(number, None), SPANS("rollout"):  # type: ignore[arg-type]
                for episode in range(BATCH_SPANS):
                    with SPANS.lane("episode"), SPANS("episode", id=f"g/{episode}"), SPANS("generate"):
                        pass
        sender._process.send_signal(signal.SIGCONT)
        began = time.monotonic()
        recorder.finish()
        return time.monotonic() - began
    finally:
        SPANS.open(folder / "none", "tests")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine takes seconds to import OpenTelemetry."""
    monkeypatch.setattr(span_sender, "CLOSE_S", 60.0)


def report(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "logs" / "report.jsonl").read_text().splitlines()]


def span(name: str, begin: int, end: int, track: str = "main", process: str = "driver (1)", **details) -> Span:
    return Span(process=process, track=track, name=name, begin=begin, end=end, details=details)


def test_each_step_is_a_trace_whose_spans_have_their_parents_and_times(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=rl")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=lab")
    said: list[str] = []
    with otlp_receiver() as receiver:
        record(tmp_path, f"{receiver.url}/", said, profiled=Profiled(steps=frozenset({1, 2})))
    assert said == []
    assert receiver.headers["x-team"] == "rl"
    assert receiver.num_requests > 2, "more spans than go into a request"
    recorded, by_id = read_spans(tmp_path / "profile"), receiver.by_id()
    assert sorted((s.process, s.track, s.name, s.begin, s.end) for s in receiver.spans) == sorted(
        (s.process, s.track, s.name, s.begin, s.end) for s in recorded
    )
    assert {tuple(sorted(s.resource.items())) for s in receiver.spans} == {
        (
            ("deployment.environment", "lab"),
            ("service.instance.id", f"driver ({os.getpid()})"),
            ("service.name", "slimrl"),
            ("slimrl.run", "demo"),
        )
    }
    roots = {s.trace: s for s in receiver.spans if not s.parent}
    assert sorted(s.attributes["slimrl.number"] for s in roots.values()) == [1, 2]
    for received in receiver.spans:
        if not received.parent:
            assert received.name == STEP
            continue
        parent = by_id[received.parent]
        assert (parent.trace, parent.begin <= received.begin, received.end <= parent.end) == (
            received.trace,
            True,
            True,
        )
        assert parent.name == {"rollout": STEP, "episode": STEP, "generate": "episode"}[received.name]
    assert [line["sent"] for line in report(tmp_path)] == [2 + 2 * BATCH_SPANS] * 2


def test_steps_that_no_profile_keeps_leave_no_files(tmp_path: Path):
    (tmp_path / "profile" / "step_000001").mkdir(parents=True)
    (tmp_path / "profile" / "trace.json").write_text("of an earlier attempt")
    with otlp_receiver() as receiver:
        record(tmp_path, receiver.url, [])
    assert len(receiver.spans) == 2 * (2 + 2 * BATCH_SPANS)
    assert sorted(path.name for path in (tmp_path / "profile").rglob("*")) == ["step_000001", "trace.json"]


def test_an_episode_of_a_worker_is_a_child_of_the_driver_s_and_other_processes_of_the_step():
    spans = [
        span(STEP, 0, 100, number=4),
        span("rollout", 0, 60),
        span("episode", 1, 50, "episode 0001", id="g/0"),
        span("episode", 2, 48, "episode 0003", "episode worker 0 (2)", id="g/0"),
        span("generate", 3, 9, "episode 0003", "episode worker 0 (2)"),
        # Its driver's span ends in a later step.
        span("episode", 2, 40, "episode 0004", "episode worker 0 (2)", id="g/1"),
        span("accumulate", 61, 90, "calls", "trainer 0 (3)"),
        span("forward", 62, 70, "calls", "trainer 0 (3)"),
        span("decode", 5, 7, "main", "engine 0 (4)", requests=3),
    ]
    made = otel_spans(spans, "demo")
    names = {one.context.span_id: (one.resource.attributes["service.instance.id"], one.name) for one in made}
    parents = {(*names[one.context.span_id], one.start_time): one.parent and names[one.parent.span_id] for one in made}
    root, worker = ("driver (1)", STEP), "episode worker 0 (2)"
    assert parents == {
        (*root, 0): None,
        ("driver (1)", "rollout", 0): root,
        ("driver (1)", "episode", 1): root,
        (worker, "episode", 2): root,
        (worker, "generate", 3): (worker, "episode"),
        ("trainer 0 (3)", "accumulate", 61): root,
        ("trainer 0 (3)", "forward", 62): ("trainer 0 (3)", "accumulate"),
        ("engine 0 (4)", "decode", 5): root,
    } | {(worker, "episode", 2): parents[worker, "episode", 2]}
    first, second = (one for one in made if names[one.context.span_id] == (worker, "episode"))
    of_ids = {one.attributes["slimrl.id"]: names[one.parent.span_id] for one in (first, second)}
    assert of_ids == {"g/0": ("driver (1)", "episode"), "g/1": root}
    assert otel_spans(spans[1:], "demo") == [], "the driver was killed in the step"


def test_a_receiver_that_refuses_is_named_once_and_what_was_dropped_at_the_end(tmp_path: Path):
    said: list[str] = []
    with otlp_receiver(status=400) as receiver:
        record(tmp_path, receiver.url, said, 3)
        assert receiver.num_requests == 3, "the rest of a step is not tried"
    dropped = 2 + 2 * BATCH_SPANS
    assert [(line["step"], line["sent"], line["dropped"]) for line in report(tmp_path)] == [
        (f"step_00000{number}", 0, dropped) for number in (1, 2, 3)
    ]
    assert "400" in report(tmp_path)[0]["error"]
    first, last = said
    assert f"{receiver.url} does not take the spans of step_000001" in first
    assert last.startswith(f"OpenTelemetry: {3 * dropped} spans were not sent to {receiver.url}")
    assert not (tmp_path / "profile").exists()


@pytest.mark.parametrize("hangs", [False, True])
def test_a_receiver_that_is_away_or_hangs_costs_the_deadline_at_the_end(tmp_path: Path, monkeypatch, hangs: bool):
    monkeypatch.setattr(span_sender, "CLOSE_S", 2.0)
    said: list[str] = []
    with otlp_receiver(hangs=True) as receiver, socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # nothing listens there
        url = receiver.url if hangs else f"http://127.0.0.1:{bound.getsockname()[1]}"
        began = time.monotonic()
        end_s = record(tmp_path, url, said, 3)
        assert time.monotonic() - began - end_s < 3, "no step waits"
    assert end_s < 2.0 + 1.0
    assert said == [
        f"OpenTelemetry: the spans of 3 steps were not sent to {url} ({tmp_path / 'logs' / 'report.jsonl'})"
    ]
    assert not (tmp_path / "profile").exists()


def test_steps_beyond_those_that_may_wait_are_dropped_and_counted(tmp_path: Path):
    said: list[str] = []
    steps = span_sender.MOST_WAITING + 4
    with otlp_receiver() as receiver:
        record(tmp_path, receiver.url, said, steps, held=True)
    lines = report(tmp_path)
    assert [line["step"] for line in lines] == [f"step_{number:06d}" for number in range(1, steps + 1)]
    each = 2 + 2 * BATCH_SPANS
    assert {line["sent"] + line["dropped"] for line in lines} == {each}
    assert lines[1]["dropped"] == each
    assert len(receiver.spans) == sum(line["sent"] for line in lines)
    assert sum(line["sent"] for line in lines[-span_sender.MOST_WAITING :]) == span_sender.MOST_WAITING * each
    for line in lines:
        assert ("steps wait" in line["error"]) == bool(line["dropped"])


def test_a_sender_that_was_killed_costs_the_run_nothing(tmp_path: Path):
    said: list[str] = []
    sender = SpanSender("http://127.0.0.1:9", "demo", tmp_path / "report.jsonl", said.append)
    sender._process.kill()
    sender._process.wait(10)
    sender.send(tmp_path / "step_000001", keep=True)
    began = time.monotonic()
    sender.close()
    assert time.monotonic() - began < 5
    assert said == [
        f"OpenTelemetry: the spans of 1 steps were not sent to http://127.0.0.1:9 ({tmp_path / 'report.jsonl'})"
    ]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("localhost:4318", "not the URL"),
        ("grpc://localhost:4317", "not the URL"),
        ("http://", "not the URL"),
        ("http://localhost:4318/?a=1", "not the URL"),
        ("https://me:secret@collector.example", "OTEL_EXPORTER_OTLP_HEADERS"),
    ],
)
def test_an_endpoint_that_is_none_is_refused_and_no_password_shown(url: str, message: str):
    recipe = Recipe()
    recipe.tracking.opentelemetry = url
    [(key, said)] = tracking_violations(recipe, "train")
    assert (key, message in said, "secret" in said) == ("tracking.opentelemetry", True, False)
    assert list(tracking_violations(recipe, "eval")) == []
    recipe.tracking.opentelemetry = "https://collector.example/otlp"
    assert list(tracking_violations(recipe, "train")) == []


def test_without_the_exporter_s_package_a_run_is_refused(monkeypatch: pytest.MonkeyPatch):
    recipe = Recipe()
    recipe.tracking.opentelemetry = "http://localhost:4318"
    assert list(missing_trackers(recipe, "train")) == []

    def away(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", away)
    [(key, said)] = missing_trackers(recipe, "sft")
    assert key == "tracking.opentelemetry"
    assert said == f"needs the package {EXPORTER}. Install it with: pip install -c requirements/lock.txt {EXPORTER}"
    assert list(missing_trackers(recipe, "eval")) == []
