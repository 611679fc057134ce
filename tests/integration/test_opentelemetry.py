"""A run whose spans go to an OTLP endpoint: they are those of its profile, and no endpoint changes the run."""

import json
import time
from collections import Counter
from pathlib import Path

import pytest
from cli_runs import RECIPES, make_workspace, steps_without_times, succeed

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from otlp_receiver import otlp_receiver

from slimrl.observability.profiling.recorder import STEP

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(900)]

GSPO = str(RECIPES / "gspo_calculator.yaml")


def test_the_spans_of_all_processes_arrive_as_the_profile_has_them(tmp_path: Path):
    workspace = make_workspace(tmp_path)
    asked = workspace.overrides("run.name=traced", "steps=2", "rollout.num_engines=1", "agent.workers=2")
    with otlp_receiver() as receiver:
        run = succeed(
            "train", GSPO, *asked, f"tracking.opentelemetry={receiver.url}", "--profile", "1-2", timeout_s=400
        )
    folder = workspace.run_folder("traced")
    assert "OpenTelemetry" not in run.stdout + run.stderr

    events = json.loads((folder.profile / "trace.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    profiled = [event for event in events if event["ph"] == "X"]
    origin = min(span.begin for span in receiver.spans)
    # Chrome's unit is the microsecond.
    assert Counter(
        (span.process, span.track, span.name, (span.begin - origin) / 1e3, (span.end - span.begin) / 1e3)
        for span in receiver.spans
    ) == Counter(
        (names[event["pid"]], tracks[event["tid"]], event["name"], event["ts"], event["dur"]) for event in profiled
    )

    by_id = receiver.by_id()
    roots = {span.trace: span for span in receiver.spans if not span.parent}
    assert sorted((span.name, span.attributes["slimrl.number"]) for span in roots.values()) == [(STEP, 1), (STEP, 2)]
    parents = Counter()
    for span in receiver.spans:
        if not span.parent:
            continue
        parent = by_id[span.parent]
        assert parent.trace == span.trace
        root = roots[span.trace]
        # Other processes see the begin and the end of a step moments apart from the driver.
        assert root.begin - 1e9 <= span.end <= root.end + 1e9
        roles = [one.process.split(" (")[0].rstrip(" 01") for one in (span, parent)]
        if parent.process == span.process and parent.track == span.track:
            assert parent.begin <= span.begin
        else:
            assert (span.name, parent.name) == ("episode", "episode") or parent is root
        parents[roles[0], span.name, roles[1], parent.name] += 1
    trajectories = 2 * 16
    assert parents["episode worker", "episode", "driver", "episode"] == trajectories
    assert parents["driver", "episode", "driver", STEP] == trajectories
    assert parents["driver", "reward", "driver", "episode"] == trajectories
    assert parents["episode worker", "start", "episode worker", "episode"] == trajectories
    assert parents["episode worker", "generate", "episode worker", "episode"] >= trajectories
    for phase in ("rollout", "logprobs", "train", "resync"):
        assert parents["driver", phase, "driver", STEP] >= 2
    assert parents["trainer", "forward", "trainer", "accumulate"] >= 2 * 2
    assert parents["engine", "decode", "driver", STEP] > 2


def test_an_endpoint_that_takes_all_or_hangs_or_is_away_changes_no_metric(tmp_path: Path):
    workspace = make_workspace(tmp_path)
    found, seconds = {}, {}
    with otlp_receiver() as taking, otlp_receiver(hangs=True) as hanging:
        for name, url in {
            "none": "", "taking": taking.url, "hanging": hanging.url, "away": "http://127.0.0.1:9",
        }.items():  # fmt: skip
            asked = workspace.overrides(
                f"run.name={name}", "steps=2", "rollout.num_engines=1", "deterministic=true",
                f"tracking.opentelemetry={url}",
            )  # fmt: skip
            began = time.monotonic()
            run = succeed("train", GSPO, *asked, timeout_s=400)
            seconds[name] = time.monotonic() - began
            folder = workspace.run_folder(name)
            found[name] = steps_without_times(folder)
            assert ("were not sent to" in run.stdout + run.stderr) == (name in ("hanging", "away"))
            assert not folder.profile.exists()
        assert len({span.trace for span in taking.spans}) == 2
        assert hanging.num_requests > 0
    assert found["taking"] == found["hanging"] == found["away"] == found["none"]
