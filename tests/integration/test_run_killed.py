"""A deterministic run that is killed again and again ends with what one ends with that nothing disturbed.

What is drawn at random follows from a seed that is printed; SLIMRL_KILL_SEED gives one again.
"""

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from cli_runs import (
    RECIPES,
    CliRun,
    Workspace,
    make_workspace,
    num_logged_steps,
    samples,
    steps_without_times,
    succeed,
)

from slimrl.observability.metrics import read_metrics
from slimrl.observability.run_folder import RunFolder

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(2400)]

GSPO = str(RECIPES / "gspo_calculator.yaml")
RUN_S = 600.0
STEPS = 6

Moment = Callable[[RunFolder], bool]
"""Whether it has come; asked again and again of a run that has sent its engines the weights that it started from."""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return make_workspace(tmp_path_factory.mktemp("run_killed"))


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    seed = int(os.environ.get("SLIMRL_KILL_SEED", random.SystemRandom().randrange(2**32)))
    print(f"{request.node.name}: SLIMRL_KILL_SEED={seed}")
    return random.Random(seed)


def command(workspace: Workspace, name: str) -> list[str]:
    """Two evaluation sets after every step, a checkpoint after every second one."""
    overrides = workspace.overrides(
        f"run.name={name}",
        "deterministic=true",
        f"steps={STEPS}",
        "trainer.num_ranks=1",
        "trainer.parallel.expert=1",
        "rollout.num_engines=2",
        "checkpoint.every_steps=2",
        "eval.at_start=true",
        "eval.every_steps=1",
        f"data.eval.train={workspace.path / 'data' / 'train.jsonl'}",
    )
    return ["train", GSPO, *overrides, "--resume-or-start"]


@pytest.fixture(scope="module")
def whole(workspace: Workspace) -> RunFolder:
    """A run that nothing disturbed."""
    succeed(*command(workspace, "whole"), timeout_s=RUN_S)
    folder = workspace.run_folder("whole")
    lines = read_metrics(folder.metrics)
    assert [line["step"] for line in lines] == list(range(STEPS + 1))
    assert all(line["policy/grad_norm"] > 0 for line in lines[1:])
    return folder


def exported(folder: RunFolder) -> dict[str, bytes]:
    """Every file of the export."""
    files = {path.name: path.read_bytes() for path in folder.export.iterdir()}
    assert any(name.endswith(".safetensors") for name in files)
    return files


def resyncs(folder: RunFolder) -> int:
    """How often weights were sent, over all starts of the run."""
    log = folder.log_file("driver")
    return log.read_text().count("resync of version") if log.is_file() else 0


def kill_at(arguments: Sequence[str], folder: RunFolder, moment: Moment, *, delay_s: float, group: bool) -> None:
    """Start or resume the run, and SIGKILL its driver, or the driver's process group, `delay_s` after the moment."""
    before = resyncs(folder)

    def has_come() -> bool:
        nonlocal before
        sent = resyncs(folder)
        # A start without a checkpoint puts the folder of the one before aside, and its log with it.
        before = min(before, sent)
        return sent > before and moment(folder)

    run = CliRun(arguments)
    try:
        run.wait_until(has_come, RUN_S, poll_s=0.005)
        time.sleep(delay_s)
        if group:
            os.killpg(run.process.pid, signal.SIGKILL)
        else:
            run.process.send_signal(signal.SIGKILL)
        assert run.wait(60) == -signal.SIGKILL, run.stdout + run.stderr
    finally:
        run.close()
    saved = sorted(path.name for path in folder.checkpoints.iterdir())
    print(f"killed {'the group' if group else 'the driver'} at {num_logged_steps(folder) - 1} steps, with {saved}")


def assert_equal(folder: RunFolder, whole: RunFolder) -> None:
    assert steps_without_times(folder) == steps_without_times(whole)
    assert samples(folder) == samples(whole)
    assert exported(folder) == exported(whole)


def test_a_run_killed_at_five_random_moments_ends_as_if_it_had_not_been(
    workspace: Workspace, whole: RunFolder, rng: random.Random
):
    folder, arguments = workspace.run_folder("random"), command(workspace, "random")
    seconds = [line["time/step_s"] + line["time/eval_s"] for line in read_metrics(whole.metrics)[1:]]
    for step in sorted(rng.randrange(STEPS) for _ in range(5)):

        def is_done(folder: RunFolder, step: int = step) -> bool:
            return num_logged_steps(folder) > step

        delay_s = rng.uniform(0.0, 0.5 * min(seconds))
        print(f"{delay_s:.2f} s after step {step}: ", end="")
        kill_at(arguments, folder, is_done, delay_s=delay_s, group=rng.random() < 0.5)
    succeed(*arguments, timeout_s=RUN_S)
    assert_equal(folder, whole)


def partial_checkpoints(folder: RunFolder) -> list[Path]:
    return list(folder.checkpoints.glob(".partial_*"))


def test_a_run_killed_where_it_writes_or_evaluates_ends_as_if_it_had_not_been(
    workspace: Workspace, whole: RunFolder, rng: random.Random
):
    folder, arguments = workspace.run_folder("placed"), command(workspace, "placed")
    eval_s = min(line["time/eval_s"] for line in read_metrics(whole.metrics))

    def evaluates(folder: RunFolder) -> bool:
        """Step 3 has sent its weights and is not written."""
        log = folder.log_file("driver").read_text()
        return "resync of version 3:" in log and num_logged_steps(folder) == 3

    def kill(moment: Moment, delay_s: float = 0.0) -> None:
        kill_at(arguments, folder, moment, delay_s=delay_s, group=rng.random() < 0.5)

    kill(lambda folder: bool(partial_checkpoints(folder)))
    assert partial_checkpoints(folder)
    assert not folder.has_checkpoint
    kill(evaluates, rng.uniform(0.0, 0.3 * eval_s))
    assert num_logged_steps(folder) == 3
    kill(lambda folder: num_logged_steps(folder) == 5)
    # The export is written beside its final name.
    kill(lambda folder: folder.export.parent.exists())
    # A rank that had its weights together ends the export without the driver; the run is complete then.
    if not folder.export.exists():
        succeed(*arguments, timeout_s=RUN_S)
    assert folder.curve.is_file()
    assert_equal(folder, whole)
