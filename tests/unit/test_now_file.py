"""What a run does at present, as its folder says it."""

import errno
import io
import logging
import time
from itertools import pairwise

import pytest
from rich.console import Console

from slimrl.base.atomic import write_whole
from slimrl.observability import now_file as module
from slimrl.observability.now_file import Doing, Now, read_now
from slimrl.observability.progress import Progress
from slimrl.runtime.step_metrics import Step

DEADLINE_S = 20.0


@pytest.fixture
def progress():
    return Progress(20, Console(file=io.StringIO()))


def wait_for(path, holds) -> Now:
    deadline = time.monotonic() + DEADLINE_S
    while not holds(now := read_now(path)):
        assert time.monotonic() < deadline, now
        time.sleep(0.01)
    return now


def test_the_file_says_step_phase_count_and_engines_and_is_gone_at_the_end(progress, tmp_path):
    path, began = tmp_path / "now.json", time.time()
    with progress.noted_in(path):
        assert read_now(path) == Now(step=None, steps=20, doing=())
        progress.engines = lambda: {"engines": {"serving": 2, "down": 1}}
        with (
            progress.step(3),
            Step(3, note=progress.part).timed("rollout"),
            progress.phase("rollout", 4, "trajectories") as phase,
        ):
            phase.advance()
            now = wait_for(path, lambda now: now.doing[1:] and now.doing[1].done == 1)
            assert (now.step, now.steps, now.engines) == (3, 20, {"engines": {"serving": 2, "down": 1}})
            part, counted = now.doing
            assert part == Doing(name="rollout", since=part.since)
            assert counted == Doing(name="rollout", since=counted.since, done=1, total=4, unit="trajectories")
            assert began <= part.since <= counted.since <= time.time()
            assert now.said == "step 3 of 20, rollout 1/4 trajectories"
        wait_for(path, lambda now: not now.doing and now.step is None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [ValueError("a failure"), KeyboardInterrupt()])
def test_a_failed_run_leaves_no_file_and_no_phase(progress, tmp_path, error):
    with (
        pytest.raises(type(error)),
        progress.noted_in(tmp_path / "now.json"),
        progress.step(1),
        progress.part("train"),
        progress.phase("train", 3, "micro-batches"),
    ):
        raise error
    assert list(tmp_path.iterdir()) == []
    assert progress._now() == Now(step=None, steps=20, doing=[])


def test_however_often_a_phase_advances_the_file_is_written_at_intervals(progress, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "INTERVAL_S", 0.2)
    written = []
    monkeypatch.setattr(
        module, "write_whole", lambda path, text: written.append(time.monotonic()) or write_whole(path, text)
    )
    began = time.monotonic()
    with progress.noted_in(tmp_path / "now.json"), progress.phase("rollout", 10**9, "tokens") as phase:
        while time.monotonic() < began + 1.0:
            phase.advance()
    took = time.monotonic() - began
    assert 2 <= len(written) <= 2 + took / 0.2
    assert all(after - before > 0.15 for before, after in pairwise(written))


def test_a_full_disk_is_logged_once_and_the_run_goes_on(progress, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(module, "INTERVAL_S", 0.01)
    tries = []

    def full(path, text):
        tries.append(text)
        raise OSError(errno.ENOSPC, "could not be written: no space left on the disk", str(path))

    monkeypatch.setattr(module, "write_whole", full)
    with caplog.at_level(logging.WARNING), progress.noted_in(tmp_path / "now.json"), progress.part("train"):
        deadline = time.monotonic() + DEADLINE_S
        while len(tries) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert len(tries) >= 3
    (record,) = caplog.records
    assert "no space left on the disk" in record.getMessage()
    assert str(tmp_path / "now.json") in record.getMessage()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"step": 1, "steps": 2, "doing": [], "more": 1}'])
def test_another_file_is_refused_by_name(tmp_path, text):
    (tmp_path / "now.json").write_text(text)
    with pytest.raises(ValueError, match=r"now\.json: not what a run writes"):
        read_now(tmp_path / "now.json")
