"""A trainer that dies is started anew in place, and the run goes on as if nothing had happened."""

import json
import random
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
from cli_runs import (
    ENGINE,
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
from slimrl.resync.ipc.shared_buffer import SHARED_MEMORY_DIR

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


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGKILL, "its process died during"),
        pytest.param(signal.SIGSTOP, "trainer: no rank made progress in", marks=pytest.mark.full),
    ],
)
def test_a_rank_that_dies_or_hangs_changes_nothing_of_a_deterministic_run(
    workspace: Workspace, whole: RunFolder, number: signal.Signals, said: str
):
    name = f"after_{number.name}"
    folder = workspace.run_folder(name)
    run = CliRun(["train", GSPO, *deterministic(workspace, name, "trainer.hang_timeout_s=15")])
    try:
        run.wait_until(lambda: num_logged_steps(folder) == 3, RUN_S)
        engines = {process.pid for process in run.members(ENGINE)}
        time.sleep(random.uniform(0.0, 1.0))
        lost = random.choice(ranks_of(run))
        lost.send_signal(number)
        run.wait_until(lambda: "the trainer has started again" in folder.log_file("driver").read_text(), RUN_S)
        assert {process.pid for process in run.members(ENGINE)} == engines
        assert run.wait(RUN_S) == 0, run.stderr
        assert run.left() == []
    finally:
        run.close()
    assert re.search(rf"warning: .*{said}.*; the trainer is started anew", run.stdout), run.stdout
    if number == signal.SIGSTOP:
        assert re.search(r"trainer [01]: no answer; trainer [01]: \d+ of \d+ done, in ", run.stdout), run.stdout
    assert steps_without_times(folder) == steps_without_times(whole)
    assert samples(folder) == samples(whole)
    assert exported(folder) == exported(whole)


def copies(run: CliRun) -> list[Path]:
    """The folder of a run's copies in memory, which has the number of its process."""
    return list(SHARED_MEMORY_DIR.glob(f"slimrl-checkpoints_*-{run.process.pid}-0"))


def test_a_rank_that_dies_costs_the_step_that_it_was_in_where_copies_are_in_memory(
    workspace: Workspace, whole: RunFolder
):
    """Without checkpoints on the disk: neither has the run any before its end."""
    folder = workspace.run_folder("copies")
    more = ("checkpoint.every_steps=0", "checkpoint.in_memory_every_steps=1")
    run = CliRun(["train", GSPO, *deterministic(workspace, "copies", *more)])
    try:
        # The copy of step 2 is complete once step 3 has come to its resync.
        run.wait_until(lambda: num_logged_steps(folder) == 4, RUN_S)
        assert len(copies(run)) == 1
        time.sleep(random.uniform(0.0, 1.0))
        random.choice(ranks_of(run)).send_signal(signal.SIGKILL)
        assert run.wait(RUN_S) == 0, run.stderr
        assert run.left() == []
    finally:
        run.close()
    (step,) = re.findall(r"the trainer has started again after \S+ s, and goes on after step (\d)", run.stdout)
    assert int(step) in (2, 3)
    assert f"continuing after step {step}, from the copy in memory" in run.stdout
    assert steps_without_times(folder) == steps_without_times(whole)
    assert samples(folder) == samples(whole)
    assert exported(folder) == exported(whole)
    assert [path.name for path in folder.checkpoints.iterdir()] == ["step_000004"]
    assert copies(run) == []


def test_groups_of_an_asynchronous_run_are_trained_on_once_whatever_becomes_of_its_trainer(workspace: Workspace):
    folder = workspace.run_folder("async")
    overrides = workspace.overrides(
        "run.name=async",
        "rollout.mode=async",
        "algorithm.correction.level=token",
        "reward.function=toy_reward:low_tokens_of_any_version",
        "steps=8",
        "checkpoint.every_steps=2",
        "trainer.num_ranks=1",
        "trainer.parallel.expert=1",
        "rollout.num_engines=1",
    )
    run = CliRun(["train", GSPO, *overrides])
    try:
        for step in (3, 6):
            run.wait_until(lambda step=step: num_logged_steps(folder) > step, RUN_S)
            ranks_of(run)[-1].send_signal(signal.SIGKILL)
            run.wait_until(lambda step=step: restarts(folder) == step // 3, RUN_S)
        assert run.wait(RUN_S) == 0, run.stderr
        assert run.left() == []
    finally:
        run.close()
    lines = read_metrics(folder.metrics)
    assert [line["step"] for line in lines] == list(range(9))
    groups = [json.loads(line) for line in folder.groups.read_text().splitlines()]
    taken = [(line["step"], line["group"]) for line in groups if line["end"] == "taken"]
    assert sorted(step for step, _ in taken) == [step for step in range(1, 9) for _ in range(4)]
    assert len({group for _, group in taken}) == len(taken)


def restarts(folder: RunFolder) -> int:
    return (
        folder.log_file("driver").read_text().count("WARNING slimrl.runtime.trainer_restarts: the trainer has started")
    )


def test_more_restarts_than_allowed_end_the_run_with_its_cause(workspace: Workspace):
    folder = workspace.run_folder("limited")
    settings = deterministic(workspace, "limited", "run.max_restarts=1", "steps=1000", "checkpoint.every_steps=0")
    run = CliRun(["train", GSPO, *settings])
    try:
        for number in (1, 2):
            run.wait_until(
                lambda number=number: num_logged_steps(folder) >= 2 and restarts(folder) == number - 1, RUN_S
            )
            ranks_of(run)[-1].send_signal(signal.SIGKILL)
        assert run.wait(RUN_S) == 1
        assert run.left() == []
    finally:
        run.close()
    assert "goes on after step 0" in run.stdout
    assert run.stderr.count("run.max_restarts = 1 within run.restart_window_s = 3600 s allows no more") == 1, run.stderr
    assert "its process died during" in run.stderr
