"""Runs whose steps replace zero-variance groups: what they record, and that a killed one continues exactly."""

import json
import signal

import pytest
from cli_runs import RECIPES, CliRun, Workspace, make_workspace, samples, steps_without_times, succeed

from slimrl.observability.metrics import read_metrics
from slimrl.observability.run_folder import RunFolder

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(1500)]

GSPO = str(RECIPES / "gspo_calculator.yaml")
RUN_S = 500.0


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return make_workspace(tmp_path_factory.mktemp("run_refill"))


def arguments(workspace: Workspace, name: str) -> list[str]:
    return workspace.overrides(
        f"run.name={name}",
        "deterministic=true",
        "steps=3",
        "trainer.num_ranks=1",
        "trainer.parallel.expert=1",
        "rollout.num_engines=1",
        "checkpoint.every_steps=1",
        "checkpoint.keep=3",
        "reward.function=toy_reward:rare_score",
        "algorithm.dynamic_sampling.refill=value",
        "algorithm.dynamic_sampling.max_refills=3",
        "algorithm.overlong={max_tokens: 48, buffer_tokens: 30, penalty: 0.01}",
        "algorithm.credit={process_weights: [0.7, 0], outcome_weights: [0.3, 1], stage_starts: [3]}",
    )


def test_a_killed_run_with_refills_continues_as_if_it_had_not_been(workspace: Workspace):
    succeed("train", GSPO, *arguments(workspace, "whole"), timeout_s=RUN_S)
    whole, killed = workspace.run_folder("whole"), workspace.run_folder("killed")
    lines = read_metrics(whole.metrics)[1:]
    for line in lines:
        assert line["rollout/trajectories"] == 4 * line["rollout/groups_sampled"]
        assert line["rollout/groups_kept"] == min(4, line["rollout/groups_useful"])
        assert line["rollout/zero_variance_fraction"] == 0.0
        assert line["reward/turns"] == pytest.approx(0.5 * line["rollout/turns_mean"])
        assert -0.01 <= line["reward/parts/overlong"] < 0
        assert line["reward/mean"] == pytest.approx(line["reward/parts/even"] + line["reward/parts/overlong"])
    assert results(whole, 1).keys() < results(whole, 3).keys()

    run = CliRun(["train", GSPO, *arguments(workspace, "killed")])
    try:
        run.wait_until((killed.checkpoints / "step_000001").is_dir, RUN_S)
        run.process.send_signal(signal.SIGKILL)
        assert run.wait(60) == -signal.SIGKILL
    finally:
        run.close()
    succeed("train", GSPO, *arguments(workspace, "killed"), "--resume", timeout_s=RUN_S)
    assert steps_without_times(killed) == steps_without_times(whole)
    assert samples(killed) == samples(whole)
    assert results(killed, 3) == results(whole, 3)


def results(folder: RunFolder, step: int) -> dict[str, list[float]]:
    """What a checkpoint says of the prompts."""
    found: dict[str, list[float]] = json.loads((folder.checkpoints / f"step_{step:06d}" / "state.json").read_text())[
        "prompt_results"
    ]
    return found
