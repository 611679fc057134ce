"""Runs whose episodes have two roles, in step and asynchronous, killed and continued."""

import json

import pytest
from cli_runs import RECIPES, CliRun, Workspace, make_workspace, steps_without_times, succeed
from slow_talk import end_turns
from test_run_resume import deterministic, exported, kill_after_checkpoint

from slimrl.observability.metrics import read_metrics

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(1500)]

GSPO = str(RECIPES / "gspo_calculator.yaml")
RUN_S = 400.0
ROLES = [
    "agent.environment=two_speakers:TwoSpeakers", "agent.tools=[]", "agent.system_prompt=null",
    "reward.function=two_speakers:even_for_the_second", "rollout.max_trajectory_tokens=512",
]  # fmt: skip


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    made = make_workspace(tmp_path_factory.mktemp("run_roles"))
    end_turns(made.path / "model")
    return made


def test_a_killed_run_of_two_roles_continues_as_if_it_had_not_been(workspace: Workspace):
    succeed("train", GSPO, *deterministic(workspace, "whole", "steps=3", *ROLES), timeout_s=RUN_S)
    whole, killed = workspace.run_folder("whole"), workspace.run_folder("killed")
    run = CliRun(["train", GSPO, *deterministic(workspace, "killed", "steps=3", *ROLES)])
    try:
        kill_after_checkpoint(run, killed, 1)
    finally:
        run.close()
    succeed("train", GSPO, *deterministic(workspace, "killed", "steps=3", *ROLES), "--resume", timeout_s=RUN_S)
    assert steps_without_times(killed) == steps_without_times(whole)
    assert exported(killed) == exported(whole)
    lines = read_metrics(whole.metrics)[1:]
    for line in lines:
        assert line["mismatch/logprob_abs_mean"] < 1e-4
        assert 0 < line["reward/role/first"] < 1
        assert 0 < line["reward/role/second"] < 1
        assert line["rollout/zero_variance_fraction"] < 1
    rows = [json.loads(row) for row in (whole.trajectories / "step_000001.jsonl").read_text().splitlines()]
    heard = [row for row in rows if row["metadata"]["num_turns"] > 1]
    assert heard
    for row in heard:
        assert set(row["metadata"]["roles"]) == {"first", "second"}
        assert {message["conversation"] for message in row["messages"]} == {"first", "second"}


def test_two_roles_are_trained_beside_rollouts_that_go_on(workspace: Workspace):
    arguments = workspace.overrides(
        "run.name=async", "steps=4", "trainer.num_ranks=1", "trainer.parallel.expert=1", "rollout.num_engines=1",
        "rollout.mode=async", "algorithm.correction.level=token", "algorithm.score_every_steps=1", *ROLES,
    )  # fmt: skip
    succeed("train", GSPO, *arguments, timeout_s=RUN_S)
    folder = workspace.run_folder("async")
    lines = read_metrics(folder.metrics)[1:]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for line in lines:
        assert line["mismatch/logprob_abs_mean"] < 1e-4
        assert 0 < line["reward/role/second"] < 1
    # For the ledger a trajectory is one, whatever its roles.
    groups = [json.loads(row) for row in (folder.path / "groups.jsonl").read_text().splitlines()]
    taken = [group for group in groups if group["end"] == "taken"]
    assert len({group["group"] for group in taken}) == len(taken) == 16
    assert all(len(group["tokens"]) == 4 for group in taken)
