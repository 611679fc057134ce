"""A trainer that dies is started anew in place, and the run goes on as if nothing had happened."""

import random
import signal
import time
from pathlib import Path

import psutil
import pytest
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

from slimrl.observability.metrics import read_metrics
from slimrl.observability.run_folder import RunFolder

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

GSPO = str(RECIPES / "gspo_calculator.yaml")
RUN_S = 400.0


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return make_workspace(tmp_path_factory.mktemp("trainer_restarts"))


def deterministic(workspace: Workspace, name: str, *more: str) -> list[str]:
    return workspace.overrides(
        f"run.name={name}",
        "deterministic=true",
        "steps=4",
        "trainer.num_ranks=2",
        "trainer.parallel.expert=2",
        "rollout.num_engines=1",
        "checkpoint.every_steps=1",
        "eval.every_steps=2",
        *more,
    )


@pytest.fixture(scope="module")
def whole(workspace: Workspace) -> RunFolder:
    """A run that nothing disturbed."""
    succeed("train", GSPO, *deterministic(workspace, "whole"), timeout_s=RUN_S)
    return workspace.run_folder("whole")


def ranks_of(run: CliRun) -> list[psutil.Process]:
    return run.members("ray::TrainerActor")


def test_a_killed_rank_changes_nothing_of_a_deterministic_run(workspace: Workspace, whole: RunFolder):
    folder = workspace.run_folder("killed")
    run = CliRun(["train", GSPO, *deterministic(workspace, "killed")])
    try:
        run.wait_until(lambda: num_logged_steps(folder) == 3, RUN_S)
        others = {process.pid for process in run.family} - {rank.pid for rank in ranks_of(run)}
        time.sleep(random.uniform(0.0, 1.0))
        random.choice(ranks_of(run)).send_signal(signal.SIGKILL)
        assert run.wait(RUN_S) == 0, run.stderr
        assert run.left() == []
    finally:
        run.close()
    print(run.stdout, run.stderr)
    assert run.stdout.count("the trainer has started again after") == 1
    assert steps_without_times(folder) == steps_without_times(whole)
    assert samples(folder) == samples(whole)
    assert exported(folder) == exported(whole)
