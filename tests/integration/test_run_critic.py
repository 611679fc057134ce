"""Runs of the command with a critic: it learns, the policy follows after its warm-up, and a killed run continues."""

import pytest
from cli_runs import RECIPES, CliRun, Workspace, make_workspace, steps_without_times, succeed
from test_run_resume import deterministic, exported, kill_after_checkpoint

from slimrl.observability.metrics import read_metrics
from slimrl.observability.run_folder import RunFolder

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(1500)]

PPO = str(RECIPES / "ppo_calculator.yaml")
RUN_S = 400.0


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return make_workspace(tmp_path_factory.mktemp("run_critic"))


def settings(workspace: Workspace, name: str, *more: str) -> list[str]:
    return deterministic(
        workspace, name, "critic.warmup_steps=1", "eval.every_steps=0", "critic.trainer.optimizer.lr=1e-3", *more
    )


def steps_of(folder: RunFolder) -> list[dict]:
    return [step for step in read_metrics(folder.metrics) if step["step"] > 0]


@pytest.fixture(scope="module")
def whole(workspace: Workspace) -> RunFolder:
    """A run that nothing disturbed."""
    succeed("train", PPO, *settings(workspace, "whole"), timeout_s=RUN_S)
    return workspace.run_folder("whole")


def test_the_critic_learns_and_the_policy_waits_for_its_warm_up(whole: RunFolder):
    steps = steps_of(whole)
    assert [step["critic/grad_norm"] > 0 for step in steps] == [True] * 4
    assert ["policy/grad_norm" in step for step in steps] == [False, True, True, True]
    # The new output layer starts at 0, so the first values are.
    assert steps[0]["critic/value_mean"] == 0
    errors = [abs(step["critic/value_mean"] - step["critic/return_mean"]) for step in steps]
    assert errors[-1] < errors[0]
    assert all(step["mismatch/logprob_abs_mean"] < 1e-4 for step in steps)


def test_a_killed_run_continues_as_if_it_had_not_been(workspace: Workspace, whole: RunFolder):
    killed = workspace.run_folder("killed")
    run = CliRun(["train", PPO, *settings(workspace, "killed")])
    try:
        kill_after_checkpoint(run, killed, 2)
    finally:
        run.close()
    succeed("train", PPO, *settings(workspace, "killed"), "--resume", timeout_s=RUN_S)
    assert steps_without_times(killed) == steps_without_times(whole)
    assert exported(killed) == exported(whole)


def test_a_critic_of_another_layout_with_the_kl_in_the_reward_gives_the_same_run(workspace: Workspace):
    """One prompt a group, so that no group gives a baseline; two updates per rollout."""
    kl = [
        "steps=2", "critic.warmup_steps=0", "rollout.samples_per_prompt=1", "rollout.prompts_per_step=8",
        "algorithm.kl_coef=0.1", "algorithm.kl_place=reward", "algorithm.kl_estimator=k1",
        "trainer.updates_per_rollout=2", "checkpoint.every_steps=0",
    ]  # fmt: skip
    two = ["critic.trainer.num_ranks=2", "critic.trainer.parallel.tensor=2", "critic.trainer.parallel.sequence=true"]
    for name, more in (("one_rank", []), ("two_ranks", two)):
        succeed("train", PPO, *settings(workspace, name, *kl, *more), timeout_s=RUN_S)
    for one, other in zip(*(steps_of(workspace.run_folder(n)) for n in ("one_rank", "two_ranks")), strict=True):
        assert one["critic/loss"] > 0
        for name in ("critic/loss", "critic/grad_norm", "critic/value_mean", "policy/grad_norm", "reward/mean"):
            assert other[name] == pytest.approx(one[name], rel=1e-3, abs=1e-6), name
