"""Runs that search the steps of their episodes: killed and continued, and beside rollouts that go on."""

import json

import pytest
from cli_runs import RECIPES, CliRun, Workspace, make_workspace, steps_without_times, succeed
from slow_talk import end_turns
from test_run_resume import deterministic, exported, kill_after_checkpoint

from slimrl.observability.metrics import read_metrics

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1500)]

GSPO = str(RECIPES / "gspo_calculator.yaml")
RUN_S = 400.0
ENVIRONMENT = [
    "agent.environment=three_questions:ThreeQuestions", "agent.tools=[]", "agent.system_prompt=null",
    "reward.function=toy_reward:low_tokens_of_any_version", "rollout.max_trajectory_tokens=512",
]  # fmt: skip
SEARCH = [
    *ENVIRONMENT, "agent.search={method: beam, width: 2, beam: 1, rollouts: 1}", "rollout.samples_per_prompt=1",
    "algorithm={name: grpo, advantage: given, credit: {name: turn}}",
]  # fmt: skip


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    made = make_workspace(tmp_path_factory.mktemp("run_search"))
    end_turns(made.path / "model")
    return made


def test_a_killed_run_that_searches_continues_as_if_it_had_not_been(workspace: Workspace):
    succeed("train", GSPO, *deterministic(workspace, "whole", "steps=3", *SEARCH), timeout_s=RUN_S)
    whole, killed = workspace.run_folder("whole"), workspace.run_folder("killed")
    run = CliRun(["train", GSPO, *deterministic(workspace, "killed", "steps=3", *SEARCH)])
    try:
        kill_after_checkpoint(run, killed, 1)
    finally:
        run.close()
    succeed("train", GSPO, *deterministic(workspace, "killed", "steps=3", *SEARCH), "--resume", timeout_s=RUN_S)
    assert steps_without_times(killed) == steps_without_times(whole)
    assert exported(killed) == exported(whole)
    for line in read_metrics(whole.metrics)[1:]:
        # The trainer agrees with the engine on the turns of all branches.
        assert line["mismatch/logprob_abs_mean"] < 1e-4
        assert line["policy/grad_norm"] > 0
    rows = [json.loads(row) for row in (whole.trajectories / "step_000001.jsonl").read_text().splitlines()]
    for row in rows:
        found = row["metadata"]["search"]
        # Of each turn two were tried, and after each of the first turns a plain episode went on to the end.
        assert (found["num_states"] >= 2, found["num_ends"] >= 2) == (True, True)


@pytest.mark.full
def test_a_search_beside_rollouts_that_go_on_in_episode_workers(workspace: Workspace):
    arguments = workspace.overrides(
        "run.name=async", "steps=3", "trainer.num_ranks=1", "trainer.parallel.expert=1", "rollout.num_engines=1",
        "rollout.mode=async", "algorithm.correction.level=token", "algorithm.score_every_steps=1", "agent.workers=2",
        *SEARCH,
    )  # fmt: skip
    succeed("train", GSPO, *arguments, timeout_s=RUN_S)
    folder = workspace.run_folder("async")
    lines = read_metrics(folder.metrics)[1:]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["mismatch/logprob_abs_mean"] < 1e-4 for line in lines)


@pytest.mark.full
def test_paths_of_a_search_are_written_as_conversations_and_learned(workspace: Workspace):
    out, told = workspace.path / "paths.jsonl", workspace.path / "sft.jsonl"
    searched = ["agent.search={method: mcts, width: 2, expansions: 3, rollouts: 1}", "rollout.samples_per_prompt=1"]
    arguments = workspace.overrides(*ENVIRONMENT, *searched)
    files = ["--out", str(out), "--conversations", str(told), "--min-reward", "0.01"]
    succeed("rollout", GSPO, *files, *arguments, timeout_s=RUN_S)
    trajectories = [json.loads(line) for line in out.open()]
    kept = [one for one in trajectories if one["status"] == "completed" and one["reward"] >= 0.01]
    conversations = [json.loads(line) for line in told.open()]
    assert [one["messages"] for one in conversations] == [one["messages"] for one in kept]
    for one in trajectories:
        # The file has the path alone, whose tokens are a part of those that were sampled.
        sampled = sum(sum(segment["loss_mask"]) for segment in one["segments"])
        assert 0 < sampled < one["metadata"]["search"]["num_tokens"]
