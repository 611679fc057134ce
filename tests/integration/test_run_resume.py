"""A run that was ended continues as if it had not been, and what is trained on the same trajectories is the same."""

import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from cli_runs import (
    RECIPES,
    CliRun,
    Workspace,
    exported,
    make_workspace,
    num_logged_steps,
    samples,
    steps_without_times,
    succeed,
)
from transformers import AutoModelForCausalLM

from slimrl.data.trajectory import read_trajectories
from slimrl.launch.slurm import PREEMPTED
from slimrl.observability.metrics import read_metrics
from slimrl.observability.run_folder import RunFolder, open_run_folder

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(1500)]

GSPO, SFT = str(RECIPES / "gspo_calculator.yaml"), str(RECIPES / "sft.yaml")
RUN_S = 400.0


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return make_workspace(tmp_path_factory.mktemp("run_resume"))


def deterministic(workspace: Workspace, name: str, *more: str) -> list[str]:
    return workspace.overrides(
        f"run.name={name}",
        "deterministic=true",
        "steps=4",
        "trainer.num_ranks=1",
        "trainer.parallel.expert=1",
        "rollout.num_engines=1",
        "checkpoint.every_steps=1",
        "eval.every_steps=1",
        *more,
    )


def kill_after_checkpoint(run: CliRun, folder: RunFolder, step: int) -> None:
    """SIGKILL for the driver, at a random moment after the checkpoint of `step`.

    It is complete by the end of the next step, so the run needs two steps more.
    """
    checkpoint = folder.checkpoints / f"step_{step:06d}"
    run.wait_until(checkpoint.is_dir, RUN_S)
    time.sleep(random.uniform(0.0, 0.5))
    run.process.send_signal(signal.SIGKILL)
    assert run.wait(60) == -signal.SIGKILL


@pytest.fixture(scope="module")
def whole(workspace: Workspace) -> RunFolder:
    """A run that nothing disturbed."""
    succeed("train", GSPO, *deterministic(workspace, "whole"), timeout_s=RUN_S)
    return workspace.run_folder("whole")


def test_a_killed_run_continues_as_if_it_had_not_been(workspace: Workspace, whole: RunFolder):
    killed = workspace.run_folder("killed")
    run = CliRun(["train", GSPO, *deterministic(workspace, "killed")])
    try:
        kill_after_checkpoint(run, killed, 2)
    finally:
        run.close()
    succeed("train", GSPO, *deterministic(workspace, "killed"), "--resume", timeout_s=RUN_S)

    assert [line["step"] for line in read_metrics(whole.metrics)] == [0, 1, 2, 3, 4]
    assert [line["policy/grad_norm"] > 0 for line in read_metrics(whole.metrics)[1:]] == [True] * 4
    assert steps_without_times(killed) == steps_without_times(whole)
    # The evaluation before the kill has left nothing in the engine that the resumed run would lack.
    assert samples(killed) == samples(whole)
    assert exported(killed) == exported(whole)


def preempt(arguments: list[str], folder: RunFolder, *, pause_s: float) -> str:
    """What a run says that gets SIGUSR1 `pause_s` after its first step, and is to be queued again."""
    run = CliRun(["train", GSPO, *arguments])
    try:
        run.wait_until(lambda: num_logged_steps(folder) >= 2, RUN_S)
        time.sleep(pause_s)
        run.process.send_signal(signal.SIGUSR1)
        assert run.wait(RUN_S) == PREEMPTED, run.stderr
        assert run.left() == []
    finally:
        run.close()
    return run.stdout + run.stderr


def test_a_preempted_run_finishes_its_step_and_continues_as_if_it_had_not_been(workspace: Workspace, whole: RunFolder):
    preempted = workspace.run_folder("preempted")
    # What an earlier start left that was killed in its first step.
    earlier = open_run_folder(preempted.path.parent, "preempted", "seed: 1\n")
    earlier.metrics.write_text('{"step": 0}\n')
    arguments = [*deterministic(workspace, "preempted", "checkpoint.every_steps=0"), "--resume-or-start"]
    said = preempt(arguments, preempted, pause_s=0.0)
    step = int(preempted.requeue.read_text())
    assert 1 <= step < 4
    assert f"preempted by SIGUSR1 after step {step} of 4" in said
    assert [path.name for path in preempted.checkpoints.iterdir()] == [f"step_{step:06d}"]
    assert not preempted.export.exists()
    aside = workspace.run_folder("preempted.attempt_000")
    assert f"had no checkpoint and is now {aside.path}" in said
    assert (aside.config.read_text(), aside.metrics.read_text()) == ("seed: 1\n", '{"step": 0}\n')
    succeed("train", GSPO, *arguments, timeout_s=RUN_S)
    assert not preempted.requeue.exists()
    assert steps_without_times(preempted) == steps_without_times(whole)
    assert exported(preempted) == exported(whole)


def test_a_rollout_that_outlasts_the_grace_is_dropped_and_made_again(workspace: Workspace):
    long = [
        "steps=2",
        "checkpoint.every_steps=0",
        "checkpoint.grace_s=0.1",
        "rollout.prompts_per_step=8",
        "rollout.sampling.max_new_tokens=600",
        "rollout.sampling.ignore_end_of_turn=true",
        "rollout.max_trajectory_tokens=1000",
    ]
    succeed("train", GSPO, *deterministic(workspace, "long", *long), timeout_s=RUN_S)
    whole, dropped = workspace.run_folder("long"), workspace.run_folder("dropped")
    arguments = deterministic(workspace, "dropped", *long)
    said = preempt(arguments, dropped, pause_s=0.5)
    assert "step 2 dropped" in said
    assert dropped.requeue.read_text() == "1\n"
    assert [path.name for path in dropped.checkpoints.iterdir()] == ["step_000001"]
    succeed("train", GSPO, *arguments, "--resume", timeout_s=RUN_S)
    assert steps_without_times(dropped) == steps_without_times(whole)
    assert exported(dropped) == exported(whole)


def test_two_runs_with_the_same_seed_are_identical_with_two_engines_and_two_ranks(workspace: Workspace):
    layout = ["trainer.num_ranks=2", "trainer.parallel.expert=2", "rollout.num_engines=2", "steps=3"]
    for name in ("first", "second"):
        succeed("train", GSPO, *deterministic(workspace, name, *layout), timeout_s=RUN_S)
    first, second = workspace.run_folder("first"), workspace.run_folder("second")
    assert steps_without_times(first) == steps_without_times(second)
    assert exported(first) == exported(second)


def test_training_on_a_trajectory_file_twice_is_identical(workspace: Workspace, tmp_path: Path):
    out = tmp_path / "trajectories.jsonl"
    succeed("rollout", GSPO, *workspace.overrides(), "--out", str(out), timeout_s=RUN_S)
    trajectories = list(read_trajectories(out))
    assert len(trajectories) == 16
    for trajectory in trajectories:
        assert_sampled_by_model(workspace.path / "model", trajectory)
    names = ("once", "again")
    for name in names:
        arguments = [*workspace.overrides(f"run.name={name}"), "--trajectories", str(out), "--steps", "2"]
        succeed("train", GSPO, *arguments, timeout_s=RUN_S)
    once, again = map(workspace.run_folder, names)
    assert [line["policy/grad_norm"] > 0 for line in read_metrics(once.metrics)] == [True, True]
    assert steps_without_times(once) == steps_without_times(again)
    assert exported(once) == exported(again)


def assert_sampled_by_model(model_path: Path, trajectory) -> None:
    """The file's log-probs of the file's tokens are those that transformers computes."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    for segment in trajectory.segments:
        tokens_T = torch.from_numpy(segment.tokens).long()
        with torch.no_grad():
            logprobs_TV = model(tokens_T[None]).logits[0].log_softmax(-1)
        logprobs_T = logprobs_TV[:-1].gather(-1, tokens_T[1:, None])[:, 0]
        sampled_T = torch.from_numpy(segment.loss_mask)[1:]
        reported_T = torch.from_numpy(segment.rollout_logprobs)[1:]
        assert (logprobs_T - reported_T)[sampled_T].abs().max() < 1e-4


@pytest.mark.parametrize(
    "layout",
    [
        ["trainer.num_ranks=2", "trainer.parallel.expert=1"],
        ["trainer.num_ranks=2", "trainer.parallel.expert=1", "trainer.parallel.pipeline=2"],
        ["trainer.num_ranks=1", "trainer.parallel.expert=1"],
    ],
    ids=["data 2", "pipeline 2", "one rank"],
)
def test_a_resume_under_another_layout_continues_the_same_training(
    workspace: Workspace, expert_parallel: RunFolder, layout: list[str], request: pytest.FixtureRequest
):
    name = request.node.callspec.id.replace(" ", "_")
    resumed = workspace.run_folder(name)
    shutil.copytree(expert_parallel.path, resumed.path)
    shutil.rmtree(resumed.checkpoints / "step_000006")
    shutil.rmtree(resumed.path / "export")
    succeed("sft", SFT, *sft_overrides(workspace, name), *layout, "--resume", timeout_s=RUN_S)
    before, after = read_metrics(expert_parallel.metrics), read_metrics(resumed.metrics)
    assert [line["step"] for line in after] == [1, 2, 3, 4, 5, 6]
    for name in ("sft/loss", "policy/grad_norm"):
        assert [line[name] for line in after] == pytest.approx([line[name] for line in before], rel=1e-5)


@pytest.fixture(scope="module")
def expert_parallel(workspace: Workspace) -> RunFolder:
    """Six updates with expert parallelism 2, saved after the third."""
    succeed("sft", SFT, *sft_overrides(workspace, "expert_parallel"), timeout_s=RUN_S)
    return workspace.run_folder("expert_parallel")


def sft_overrides(workspace: Workspace, name: str) -> list[str]:
    return [
        f"run.dir={workspace.path / 'runs'}",
        f"run.name={name}",
        f"model.path={workspace.path / 'model'}",
        f"data.train={workspace.path / 'data' / 'sft.jsonl'}",
        "trainer.parallel.expert=2",
        "steps=6",
        "trainer.optimizer.warmup_updates=2",
        "checkpoint.every_steps=3",
        "tracking.wandb=disabled",
    ]
