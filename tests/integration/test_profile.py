"""A profiled run: spans of all its processes, in a trace whose parts fit together."""

import json
from pathlib import Path

import pytest
from cli_runs import RECIPES, make_workspace, succeed

from slimrl.observability.profiling.breakdown import step_profiles
from slimrl.observability.profiling.trace import read_spans

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

GSPO = str(RECIPES / "gspo_calculator.yaml")


@pytest.mark.full
def test_a_profile_has_the_spans_of_every_process_of_its_step(tmp_path: Path):
    workspace = make_workspace(tmp_path)
    asked = workspace.overrides(
        "run.name=profiled", "steps=2", "rollout.num_engines=1", "agent.workers=2", "eval.at_start=false",
        "eval.at_end=false",
    )  # fmt: skip
    run = succeed("train", GSPO, *asked, "--profile", "2", "--profile-torch", timeout_s=400)
    folder = workspace.run_folder("profiled")
    assert f"trace: {folder.profile.absolute() / 'trace.json'}" in run.stdout
    [profile] = step_profiles(read_spans(folder.profile))
    assert profile.number == 2
    assert {"rollout", "logprobs", "train", "resync"} <= profile.phases.keys()
    assert sum(profile.phases.values()) == pytest.approx(profile.seconds)
    by_role = {}
    for process, times in profile.processes.items():
        by_role.setdefault(process.split(" (")[0], set()).update(times)
    assert {"trainer: accumulate", "trainer: resync", "episode", "reward"} <= by_role["driver"]
    for rank in (0, 1):
        assert {"forward", "backward", "optimizer", "gather", "activate"} <= by_role[f"trainer {rank}"]
    assert {"receive", "schedule", "prefill", "decode", "results"} <= by_role["engine 0"]
    for worker in (0, 1):
        assert {"episode", "start", "generate", "parse"} <= by_role[f"episode worker {worker}"]

    events = json.loads((folder.profile / "trace.json").read_text())["traceEvents"]
    step = next(event for event in events if event["name"] == "whole step")
    # torch's events lie in the step too, on the same clock.
    products = [event for event in events if event["name"] == "aten::mm"]
    assert {event["pid"].split(":")[0] for event in products} == {"trainer_0", "trainer_1"}
    assert all(step["ts"] <= event["ts"] <= step["ts"] + step["dur"] for event in products)

    printed = succeed("report", str(folder.path), "--out", str(tmp_path / "curve.png"), timeout_s=60).stdout
    assert "step 2, of its profile" in printed
    assert "engine 0" in printed
