"""Runs with a teacher: of the run's own, on servers of others, and one that dies and is restarted."""

from pathlib import Path

import numpy as np
import pytest
import torch
from cli_runs import (
    ENGINE,
    RECIPES,
    CliRun,
    Workspace,
    engine_server,
    make_workspace,
    num_logged_steps,
    run_cli,
    steps_without_times,
    succeed,
)
from engine_probes import KEY
from fleet import Fleet
from slimrl_tools.toy.toy import ToySize, write_toy
from transformers import AutoModelForCausalLM

from slimrl.config.schema.precision import Precision
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.data.trajectory import Trajectory, read_trajectories
from slimrl.observability.metrics import read_metrics

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

GSPO = str(RECIPES / "gspo_calculator.yaml")
RUN_S = 250.0
SMALL = (
    "steps=2",
    "trainer.num_ranks=1",
    "trainer.parallel.expert=1",
    "rollout.num_engines=1",
    "checkpoint.every_steps=1",
)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    made = make_workspace(tmp_path_factory.mktemp("run_teacher"))
    # Larger than the policy, with the same tokenizer.
    write_toy("qwen3_moe", made.path / "teacher", ToySize(layers=3, hidden=96, moe_intermediate=64, init_std=0.1), 7)
    return made


def worst_gap(teacher: Path, trajectories: list[Trajectory]) -> float:
    """The largest difference of the teacher's log-probs from those of transformers in float64."""
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float64, experts_implementation="eager")
    worst = 0.0
    for segment in (segment for trajectory in trajectories for segment in trajectory.segments):
        ids_T = torch.from_numpy(segment.tokens).long()
        with torch.no_grad():
            logprobs_TV = model(ids_T[None]).logits[0].log_softmax(-1)
        expected = np.zeros(len(segment))
        expected[1:] = logprobs_TV[:-1].gather(-1, ids_T[1:, None])[:, 0].numpy()
        assert (segment.teacher_logprobs[~segment.loss_mask] == 0).all()
        worst = max(worst, np.abs(segment.teacher_logprobs - np.where(segment.loss_mask, expected, 0)).max())
    return worst


@pytest.mark.full
def test_trajectories_of_a_rollout_have_the_teacher_s_log_probs_and_can_be_trained_on(workspace: Workspace):
    teacher, out = workspace.path / "teacher", workspace.path / "trajectories.jsonl"
    overrides = workspace.overrides(*SMALL, f"teacher.path={teacher}", "rollout.prompts_per_step=2")
    succeed("rollout", GSPO, *overrides, "--out", str(out), timeout_s=RUN_S)
    trajectories = read_trajectories(out)
    assert len(trajectories) == 8
    assert worst_gap(teacher, trajectories) <= 1e-4


@pytest.mark.full
def test_a_run_with_a_teacher_measures_the_reverse_kl_and_repeats_itself(workspace: Workspace):
    lines = []
    for name in ("first", "second"):
        overrides = workspace.overrides(
            *SMALL,
            f"run.name=teacher-{name}",
            f"teacher.path={workspace.path / 'teacher'}",
            "teacher.num_engines=2",
            "deterministic=true",
        )
        succeed("train", GSPO, *overrides, timeout_s=2 * RUN_S)
        folder = workspace.run_folder(f"teacher-{name}")
        lines.append(steps_without_times(folder))
    assert lines[0] == lines[1]
    first, *steps = read_metrics(folder.metrics)
    assert "distill/reverse_kl" not in first
    for step in steps:
        # Two random models of this initialisation are far apart.
        assert 0.05 < step["distill/reverse_kl"] < 20
        assert 0 < step["time/teacher_s"] < step["time/rollout_s"]
        assert step["rollout/failed_fraction"] == 0
    log = folder.log_file("driver").read_text()
    assert "teacher 1, server on" in log
    assert (folder.logs / "teacher_1.log").is_file()


@pytest.mark.full
def test_a_teacher_on_a_server_of_others_scores_and_is_left_running(workspace: Workspace, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("TEACHER_KEY", KEY.value)
    teacher = workspace.path / "teacher"
    rollout = RolloutConfig(max_trajectory_tokens=320, max_concurrency_per_engine=8, startup_timeout_s=200)
    with Fleet(rollout, teacher, tmp_path, precision=Precision.fp32) as fleet:
        (url,) = fleet.engine_urls
        out = tmp_path / "trajectories.jsonl"
        server = [f"teacher.urls=[{url}]", "teacher.api_key_env=TEACHER_KEY"]
        overrides = workspace.overrides(*SMALL, *server, "rollout.prompts_per_step=2")
        succeed("rollout", GSPO, *overrides, "--out", str(out), timeout_s=RUN_S)
        assert worst_gap(teacher, read_trajectories(out)) <= 1e-4
        fleet.check()
    overrides = workspace.overrides(*SMALL, "teacher.urls=[http://127.0.0.1:9]")
    refused = run_cli("rollout", GSPO, *overrides, "--out", str(tmp_path / "other.jsonl"), timeout_s=RUN_S)
    assert refused.process.returncode != 0
    assert "teacher.urls: http://127.0.0.1:9: no teacher answers there" in refused.stderr


@pytest.mark.full
def test_a_teacher_that_dies_is_restarted_and_after_too_often_the_run_ends_with_the_cause(workspace: Workspace):
    teacher = f"teacher.path={workspace.path / 'teacher'}"
    limit = "teacher.max_replacements=1"
    overrides = workspace.overrides(*SMALL, "run.name=dies", "steps=1000", teacher, limit)
    run = CliRun(["train", GSPO, *overrides])
    try:
        run.wait_until(workspace.run_folder("dies").sample_file(1).is_file, RUN_S)
        engine_server(run.members(ENGINE), "teacher_0.log").kill()
        folder = workspace.run_folder("dies")
        run.wait_until((folder.logs / "teacher_0_start_1.log").is_file, RUN_S)
        steps = num_logged_steps(folder)
        run.wait_until(lambda: num_logged_steps(folder) >= steps + 3, RUN_S)
        assert all(step["rollout/failed_fraction"] == 0 for step in read_metrics(folder.metrics)[1:])
        engine_server(run.members(ENGINE), "teacher_0_start_1.log").kill()
        assert run.wait(RUN_S) == 1, run.stderr
        assert "teacher 0 was ended by SIGKILL" in run.stderr
        assert not run.left()
    finally:
        run.close()
