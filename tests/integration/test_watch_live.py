"""A run of the tiny toy watched from another terminal: while it goes on, when it ends, and after it was killed."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli_runs import RECIPES, CliRun, Workspace, make_workspace, num_logged_steps
from terminal_run import CONTROL, INTERRUPT, TerminalRun

from slimrl.observability.now_file import read_now

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

RUN_S = 600.0
WATCH = [sys.executable, "-m", "slimrl.cli", "watch"]
SHOWS, HIDES = "\x1b[?1049h", "\x1b[?1049l"
"""A terminal changes to its second screen, and back"""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return make_workspace(tmp_path_factory.mktemp("watch"))


def once(folder: Path) -> str:
    ended = subprocess.run([*WATCH, str(folder), "--once"], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert CONTROL.search(ended.stdout) is None
    return ended.stdout


def test_a_live_run_is_watched_until_the_user_or_the_run_ends(workspace: Workspace):
    folder = workspace.run_folder("watched")
    overrides = workspace.overrides(
        "run.name=watched",
        "steps=4",
        "trainer.num_ranks=1",
        "trainer.parallel.expert=1",
        "rollout.num_engines=1",
        # A step lasts some seconds also on a fast machine.
        "rollout.max_concurrency_per_engine=1",
        "rollout.sampling.max_new_tokens=96",
    )
    run = CliRun(["train", str(RECIPES / "gspo_calculator.yaml"), *overrides])
    try:
        run.wait_until(folder.now.is_file, RUN_S)
        assert re.search("(starting|running)  step 0 of 4", once(folder.path))
        with TerminalRun([*WATCH, str(folder.path)]) as terminal:
            terminal.read_until(lambda text: re.search(r"step 1: rollout for 0:00:\d\d", text), RUN_S)
            terminal.read_until(lambda text: re.search(r"rollout \d+/16 trajectories", text), RUN_S)
            assert "engines: 1 of 1 serve" in terminal.text
            terminal.send(INTERRUPT)
            assert terminal.end(60) == 0
            assert terminal.raw.count(SHOWS) == terminal.raw.count(HIDES) == 1
            assert "Traceback" not in terminal.text
        with TerminalRun([*WATCH, str(folder.path)]) as terminal:
            assert terminal.end(RUN_S) == 0
            text = terminal.text
            assert terminal.raw.count(SHOWS) == terminal.raw.count(HIDES) == 1
        assert "about 0:00:" in text, "what is left, once a step has ended"
        assert "complete  step 4 of 4" in text, text[-4000:]
        last = text[text.rindex("complete  step 4 of 4") :]
        assert "reward/mean" in last
        assert "answers of step 4" in re.sub(" +", " ", last)
        assert run.wait(RUN_S) == 0, run.stderr
    finally:
        run.close()
    assert not folder.now.exists()
    assert "complete  step 4 of 4" in once(folder.path)


@pytest.mark.full
def test_a_killed_run_is_not_running_and_a_failed_one_says_why(workspace: Workspace):
    folder = workspace.run_folder("killed")
    settings = [
        f"run.dir={workspace.path / 'runs'}",
        "run.name=killed",
        f"model.path={workspace.path / 'model'}",
        f"data.train={workspace.path / 'data' / 'sft.jsonl'}",
        "steps=100000",
        "trainer.num_ranks=1",
        "trainer.parallel.expert=1",
        "tracking.wandb=disabled",
    ]
    command = ["sft", str(RECIPES / "sft.yaml"), *settings]
    run = CliRun(command)
    try:
        run.wait_until(lambda: num_logged_steps(folder) > 3, RUN_S)
        text = once(folder.path)
        assert "running" in text
        assert "sft/loss" in text
        os.kill(run.process.pid, signal.SIGKILL)
        run.wait(60)
        assert run.left() == []
    finally:
        run.close()
    now = read_now(folder.now)
    assert now is not None
    assert now.steps == 100000
    text = once(folder.path)
    assert "ended early" in text
    assert f"not running: it was killed, {now.said}" in text
    failing = CliRun([*command, "run.name=failed", "stop.grad_norm=1e-12", "stop.patience_steps=1"])
    try:
        assert failing.wait(RUN_S) == 1, failing.stderr
    finally:
        failing.close()
    text = once(workspace.run_folder("failed").path)
    assert "failed  step 1 of 100000" in text
    assert "grad_norm" in text
