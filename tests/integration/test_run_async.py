"""Runs whose rollouts go on beside the training, with the real trainer, engines and resync."""

import json
import signal
from collections import Counter
from pathlib import Path

import pytest
from cli_runs import RECIPES, CliRun, Workspace, make_workspace, succeed

from slimrl.observability.metrics import read_metrics

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

GSPO = str(RECIPES / "gspo_calculator.yaml")
RUN_S = 300.0
STEPS = 6


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return make_workspace(tmp_path_factory.mktemp("run_async"))


def arguments(workspace: Workspace, name: str, *more: str) -> list[str]:
    return workspace.overrides(
        f"run.name={name}", f"steps={STEPS}", "trainer.num_ranks=1", "trainer.parallel.expert=1",
        "rollout.num_engines=1", "reward.function=toy_reward:low_tokens_of_any_version",
        "algorithm.correction.level=token", "algorithm.score_every_steps=1", "resync.verify=full", *more,
    )  # fmt: skip


def ledger(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "groups.jsonl").read_text().splitlines()]


def check(workspace: Workspace, name: str, staleness: int) -> None:
    """Every step's log-probs agree under the trainer's weights, no group is too old, and each is accounted for once."""
    folder = workspace.run_folder(name)
    lines = read_metrics(folder.metrics)[1:]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line in lines:
        assert line["mismatch/logprob_abs_mean"] < 1e-4
        assert line["resync/fingerprint_mismatches"] == 0
        assert line["async/age_max"] <= staleness
    groups = ledger(folder.path)
    assert Counter(line["group"] for line in groups).most_common(1)[0][1] == 1
    taken = [line for line in groups if line["end"] == "taken"]
    per_step = Counter(line["step"] for line in taken)
    assert per_step == dict.fromkeys(range(1, STEPS + 1), lines[0]["rollout/trajectories"] // 4)
    for line in taken:
        assert all(0 <= line["step"] - 1 - update <= staleness for update in line["updates"])
    assert sum(line["async/dropped_groups"] for line in lines) == sum(line["end"] == "dropped" for line in groups)


def test_an_asynchronous_run_that_was_killed_trains_on_every_group_once_and_none_is_too_old(workspace: Workspace):
    asked = arguments(workspace, "async", "rollout.mode=async", "checkpoint.every_steps=2")
    folder = workspace.run_folder("async")
    run = CliRun(["train", GSPO, *asked])
    try:
        run.wait_until((folder.checkpoints / "step_000002").is_dir, RUN_S)
        run.process.send_signal(signal.SIGKILL)
        assert run.wait(60) == -signal.SIGKILL
    finally:
        run.close()
    succeed("train", GSPO, *asked, "--resume", timeout_s=RUN_S)
    check(workspace, "async", 1)


def test_one_step_off_changes_the_weights_when_nothing_runs(workspace: Workspace):
    # The scores are of the present weights, whose routers choose other experts than those that are replayed.
    replay = ("rollout.routed_experts=true", "algorithm.routing_replay=rollout", "resync.pause=abort")
    succeed("train", GSPO, *arguments(workspace, "off", "rollout.mode=one_step_off", *replay), timeout_s=RUN_S)
    check(workspace, "off", 1)
    for line in ledger(workspace.run_folder("off").path):
        assert len(line["updates"]) == 1
        assert line["updates"] == [max(0, line["step"] - 2)]


def test_an_evaluation_beside_the_training_has_the_weights_of_its_step_and_its_engine_comes_back(workspace: Workspace):
    asked = arguments(
        workspace,
        "beside",
        "rollout.mode=async",
        "rollout.num_engines=2",
        "eval.engines=1",
        "eval.every_steps=2",
        "eval.at_start=true",
    )
    succeed("train", GSPO, *asked, timeout_s=RUN_S)
    check(workspace, "beside", 1)
    folder = workspace.run_folder("beside")
    # A line of its own for each evaluation but the last, which all engines make. A run in which other weights than the
    # step's had sampled would have ended.
    evaluated = {line["step"] for line in read_metrics(folder.metrics) if "eval/heldout/reward_mean" in line}
    assert evaluated == {0, 2, 4, 6}
    lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    beside = [line for line in lines if "time/eval_s" in line and "time/step_s" not in line]
    assert [line["step"] for line in beside] == [0, 2, 4]
    assert "of 2 engines" in folder.log_file("driver").read_text()
    resyncs = [line for line in folder.log_file("driver").read_text().splitlines() if "resync of version" in line]
    # Without the engine that evaluates, and with it again.
    assert any("1 of 1 engines" in line for line in resyncs)
    assert "2 of 2 engines" in resyncs[-1]
