"""Runs whose rollouts go on beside the training, with the real trainer, engines and resync."""

import json
import signal
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from cli_runs import RECIPES, CliRun, Workspace, make_workspace, succeed
from slow_talk import FILE_VARIABLE, TURNS, end_turns

from slimrl.data.trajectory import from_json
from slimrl.engines.turn_logs import read_turns
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


def check_continued(checkpoint: Path, scored: list[dict]) -> int:
    """The trajectories that ran when a checkpoint was saved have the tokens that it holds of them, unchanged.

    Args:
        scored: the lines of `noted` of the runs that went on from it, by the id of their trajectory.

    Returns:
        How many tokens it holds of trajectories that were scored.
    """
    by_id = {one["trajectory_id"]: one for one in scored}
    count = 0
    for trajectory_id, turns in read_turns(checkpoint / "rollout").items():
        answers = [answer for turn in turns for answer in turn.answers]
        if trajectory_id not in by_id or not answers:
            continue
        [segment] = from_json({k: v for k, v in by_id[trajectory_id].items() if k != "pid"}).segments
        known = sum(len(answer.tokens) for answer in answers)
        assert segment.loss_mask.sum() >= known
        places = np.flatnonzero(segment.loss_mask)[:known]
        assert segment.tokens[places].tolist() == [token for answer in answers for token in answer.tokens]
        logprobs = np.array([logprob for answer in answers for logprob in answer.logprobs], np.float32)
        np.testing.assert_array_equal(segment.rollout_logprobs[places], logprobs)
        versions = np.concatenate([answer.weight_versions for answer in answers])
        np.testing.assert_array_equal(segment.weight_versions[places], versions)
        assert by_id[trajectory_id]["metadata"]["num_replayed_tokens"] == known
        count += known
    return count


@pytest.mark.full
def test_an_asynchronous_run_that_is_killed_and_preempted_samples_no_token_twice_and_trains_on_every_group_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    workspace = make_workspace(tmp_path)
    end_turns(tmp_path / "model")
    asked = arguments(
        workspace, "async", "rollout.mode=async", "rollout.max_staleness=3", "rollout.chunk_tokens=8",
        "checkpoint.every_steps=2", "checkpoint.keep=5",
        "agent.tools=[]", "agent.system_prompt=null", "agent.environment=slow_talk:SlowTalk",
    )  # fmt: skip
    asked[asked.index("reward.function=toy_reward:low_tokens_of_any_version")] = "reward.function=slow_talk:noted"
    notes = workspace.path / "noted.jsonl"
    monkeypatch.setenv(FILE_VARIABLE, str(notes))
    folder = workspace.run_folder("async")

    def end_after(step: int, number: signal.Signals, *more: str) -> CliRun:
        """A run that gets a signal when a step's checkpoint, or a later one, is there."""
        run = CliRun(["train", GSPO, *asked, *more])
        try:
            run.wait_until((folder.checkpoints / f"step_{step:06d}").is_dir, RUN_S)
            run.process.send_signal(number)
            run.wait(120)
        finally:
            run.close()
        return run

    assert end_after(2, signal.SIGKILL).process.returncode == -signal.SIGKILL
    killed_at, num_noted = sorted(folder.checkpoints.iterdir())[-1], len(notes.read_text().splitlines())
    assert end_after(4, signal.SIGUSR1, "--resume").process.returncode == 75
    preempted_at = sorted(folder.checkpoints.iterdir())[-1]
    assert preempted_at.name < "step_000006"
    num_preempted = len(notes.read_text().splitlines())
    succeed("train", GSPO, *asked, "--resume", timeout_s=RUN_S)
    check(workspace, "async", 3)
    scored = [json.loads(line) for line in notes.read_text().splitlines()]
    assert check_continued(killed_at, scored[num_noted:num_preempted]) > 0
    assert check_continued(preempted_at, scored[num_preempted:]) > 0
    metrics = read_metrics(folder.metrics)[1:]
    assert sum(line["async/replayed_tokens"] for line in metrics) > 0
    assert max(line["rollout/turns_mean"] for line in metrics) > TURNS / 2


@pytest.mark.full
def test_one_step_off_changes_the_weights_when_nothing_runs(workspace: Workspace):
    # The scores are of the present weights, whose routers choose other experts than those that are replayed.
    replay = ("rollout.routed_experts=true", "algorithm.routing_replay=rollout", "resync.pause=abort")
    succeed("train", GSPO, *arguments(workspace, "off", "rollout.mode=one_step_off", *replay), timeout_s=RUN_S)
    check(workspace, "off", 1)
    for line in ledger(workspace.run_folder("off").path):
        assert len(line["updates"]) == 1
        assert line["updates"] == [max(0, line["step"] - 2)]


def test_a_background_evaluation_has_the_weights_of_its_step_and_its_engine_comes_back(workspace: Workspace):
    asked = arguments(
        workspace,
        "beside",
        "rollout.mode=async",
        "rollout.num_engines=2",
        "eval.engines=1",
        "eval.every_steps=2",
        "eval.at_start=true",
        # Longer than a step, so that a resync comes while an engine evaluates.
        "eval.samples_per_prompt=4",
        "rollout.eval_sampling.temperature=1.0",
        "rollout.eval_sampling.max_new_tokens=200",
        "rollout.eval_sampling.ignore_end_of_turn=true",
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
