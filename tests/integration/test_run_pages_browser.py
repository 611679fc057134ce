"""The pages of runs that the command made: each opens in chromium without an error, with all its controls, and shows
what the run's folder has."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from cli_runs import RECIPES, Workspace, make_workspace, run_cli
from shown_talk import TURNS
from slow_talk import end_turns
from venvs import environment_python

from slimrl.observability.metrics import read_metrics

pytestmark = [pytest.mark.browser, pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(900)]

DRIVER = Path(__file__).parents[1] / "drive_run_page.py"
RUN_S = 500.0
GSPO, ASYNC = str(RECIPES / "gspo_calculator.yaml"), str(RECIPES / "gspo_calculator_async.yaml")
SOLVER = (
    "{solver: {description: Solves., system_prompt: Solve the task., "
    'tools: ["slimrl.agent.calculator:calculator"], max_turns: 2}}'
)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    environment_python("miniwob")
    made = make_workspace(tmp_path_factory.mktemp("run_pages"))
    end_turns(made.path / "model")
    return made


def train(workspace: Workspace, name: str, recipe: str, *more: str, code: int = 0) -> None:
    short = ("steps=2", "trainer.num_ranks=1", "trainer.parallel.expert=1", "rollout.num_engines=1",
             "rollout.sampling.max_new_tokens=48")  # fmt: skip
    run = run_cli("train", recipe, *workspace.overrides(f"run.name={name}", *short, *more), timeout_s=RUN_S)
    assert run.process.returncode == code, f"{run.stdout}\n{run.stderr}"


def page(workspace: Workspace, name: str) -> dict:
    """What chromium saw of the run's page, which `slimrl report` makes, after every control was used."""
    file = workspace.path / f"{name}.html"
    made = run_cli("report", str(workspace.run_folder(name).path), "--html", str(file), timeout_s=100.0)
    assert made.process.returncode == 0, made.stderr
    command = [str(environment_python("miniwob")), str(DRIVER), str(file)]
    without_path = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=without_path)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["errors"] == []
    assert {url.split(":")[0] for url in seen["requests"]} <= {"file", "data", "blob"}
    assert max(seen["too_wide"].values()) <= 1
    assert not any("[object" in text or "undefined" in text for text in seen["texts"].values())
    assert all(used >= 2 for used in seen["used"].values())
    return seen


def test_a_run_of_the_quickstart(workspace):
    evaluated = ("eval.every_steps=1", "eval.at_start=true", "eval.at_end=true")
    train(workspace, "quickstart", GSPO, *evaluated)
    seen = page(workspace, "quickstart")
    assert list(seen["texts"]) == ["overview", "curves", "time", "trajectories", "experts"]
    first, *_, last = read_metrics(workspace.run_folder("quickstart").metrics)
    assert "complete" in seen["texts"]["overview"]
    assert "step 2 of 2" in seen["texts"]["overview"]
    assert f"± {1.96 * last['eval/heldout/stderr/reward_mean']:.2g}" in seen["texts"]["overview"]
    assert first["step"] == 0
    shown = seen["views"].values()
    assert {one["set"] for one in shown} == {"heldout", "training"}
    assert any(one["views"] == ["conversation", "tokens", "group"] for one in shown)


def test_an_asynchronous_run_whose_environment_shows_images(workspace):
    train(workspace, "async", ASYNC, "agent.tools=[]", "agent.system_prompt=null",
          "agent.environment=shown_talk:ShownTalk", "reward.function=toy_reward:low_tokens_of_any_version")  # fmt: skip
    seen = page(workspace, "async")
    assert "complete" in seen["texts"]["overview"]
    assert "Staleness" in seen["texts"]["curves"]
    with_images = [one for one in seen["views"].values() if one["images"]]
    assert {width for one in with_images for width in one["images"]} == {16}, "each is drawn, 16 points wide"
    completed = [one for one in with_images if len(one["images"]) == TURNS + 1]
    assert completed, "a turn that was cut has no state after it"
    for one in completed:
        assert "what the environment showed before turn 0" in one["text"]
        assert "what the environment showed at the end" in one["text"]


def test_a_run_with_sub_agents_shows_them_below_the_turn_that_called_them(workspace):
    train(workspace, "subagents", GSPO, "agent.episode=shown_talk:delegating", f"agent.subagents={SOLVER}",
          "rollout.max_turns=8", "rollout.max_trajectory_tokens=900")  # fmt: skip
    assert read_metrics(workspace.run_folder("subagents").metrics)[-1]["rollout/subagents_mean"] > 1
    seen = page(workspace, "subagents")
    called = [one for one in seen["views"].values() if one["subagents"]]
    assert called, "a first turn that was cut has called none"
    for one in called:
        assert [text.split(",")[0] for text in one["subagents"]] == ["sub-agent solver"] * 2
        assert [f"call {number}," in one["subagents"][number] for number in (0, 1)] == [True, True]
        assert "Solve part one." in one["subagents"][0]
        assert "Solve part two." in one["subagents"][1]
        # Below the first turn, above the second.
        places = [one["text"].index(words) for words in ("turn 0", "Solve part one.", "Solve part two.", "turn 1")]
        assert places == sorted(places)
        if "segments" in one:
            *of_solvers, of_caller = one["segments"]
            assert all(", sub-agent solver," in title for title in of_solvers)
            assert "sub-agent" not in of_caller


def test_a_run_that_failed_says_why(workspace):
    train(workspace, "failed", GSPO, "reward.function=shown_talk:raising", code=1)
    assert [line["step"] for line in read_metrics(workspace.run_folder("failed").metrics)] == [0]
    seen = page(workspace, "failed")
    assert "the judge of the answers has no <b>paper</b>" in seen["texts"]["overview"]
    assert "No step has ended yet." in seen["texts"]["overview"]
    assert seen["views"], "the trajectories that failed"
    for one in seen["views"].values():
        assert "the judge of the answers has no <b>paper</b>" in one["text"]
