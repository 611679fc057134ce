"""A run whose trainer and engine share one GPU, and one whose only engine is killed."""

import pytest
import torch
from cli_runs import CliRun, Workspace, num_logged_steps, succeed
from machine import choose, on_gpu
from toy_runs import RECIPE, RUN_S, assert_verified, workspace_at

from slimrl.checkpoints.hf_check import check_checkpoint

pytestmark = pytest.mark.timeout(600)

MISMATCH_NAT = 0.05
"""Limit of the log-probs' mismatch, bf16 on both sides, as in the recipe"""
SLACK_BYTES = 512 << 20
STEPS = 3


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return workspace_at(tmp_path_factory.mktemp("colocated"))


def arguments(workspace: Workspace, name: str, *more: str) -> list[str]:
    settings = (f"run.name={name}", f"steps={STEPS}", "resync.verify=full", "rollout.routed_experts=true", *more)
    return ["train", RECIPE, *workspace.overrides(*settings)]


@pytest.mark.proves("the whole loop on one GPU: memory released and taken again, CUDA graphs, routed experts, export")
def test_a_colocated_run_in_bf16_trains_what_its_engine_serves(workspace, figure):
    succeed(*arguments(workspace, "whole"), timeout_s=RUN_S)
    folder = workspace.run_folder("whole")
    lines = assert_verified(folder, STEPS, mismatch=MISMATCH_NAT)
    check_checkpoint(folder.export)
    last = lines[-1]
    figure(
        f"mismatch of log-probs {last['mismatch/logprob_abs_mean']:.4f} nat, {last['mismatch/routing_flips']:g} flips"
    )
    figure(f"step {last['time/step_s']:.1f} s, resync {last['resync/seconds']:.2f} s")


def used_bytes() -> int:
    """Bytes that all processes together have taken on the GPU; 0 without one."""
    if not on_gpu():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.mark.proves("a run whose only engine dies names the cause, leaves no process and no memory, and resumes")
def test_a_run_whose_engine_is_killed_in_step_two_stops_and_goes_on_when_it_is_resumed(workspace):
    folder, before = workspace.run_folder("killed"), used_bytes()
    command = arguments(workspace, "killed", "checkpoint.every_steps=1")
    run = CliRun(command)
    try:
        run.wait_until(lambda: num_logged_steps(folder) >= 2, RUN_S)
        run.kill_server(0)
        assert run.wait(RUN_S) == 1, run.stderr
        assert run.left() == []
    finally:
        run.close()
    assert "engine 0 was ended by SIGKILL" in run.stderr
    assert "Traceback" not in run.stderr
    assert used_bytes() - before < choose(SLACK_BYTES, 1)
    assert num_logged_steps(folder) == 2
    succeed(*command, "--resume-or-start", timeout_s=RUN_S)
    assert_verified(folder, STEPS, mismatch=MISMATCH_NAT)
