"""Two processes never write one folder: the second is told who is at work there."""

import errno
import fcntl
import os
import re
import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from slimrl.base import folder_lock as module
from slimrl.base.folder_lock import folder_lock
from slimrl.config.load import load_recipe
from slimrl.observability.progress import Progress
from slimrl.runtime import start

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny_moe" / "gspo_calculator.yaml"


def test_a_second_holder_is_refused_with_the_first_ones_host_process_and_time(tmp_path: Path):
    held_by = rf"{tmp_path} is in use by process {os.getpid()} on {socket.gethostname()} since \d{{4}}-\d\d-\d\dT\S+"
    with folder_lock(tmp_path), pytest.raises(ValueError, match=held_by), folder_lock(tmp_path):
        raise AssertionError
    with folder_lock(tmp_path):
        pass


def test_a_holder_that_is_ending_is_waited_for(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(module, "POLL_S", 0.01)
    said, is_waiting = [], threading.Event()

    def say(text: str) -> None:
        said.append(text)
        is_waiting.set()

    def hold() -> None:
        with folder_lock(tmp_path):
            is_held.set()
            assert is_waiting.wait(20)

    is_held = threading.Event()
    first = threading.Thread(target=hold)
    first.start()
    assert is_held.wait(20)
    with folder_lock(tmp_path, wait_s=20, say=say):
        first.join(20)
    assert len(said) == 1
    assert re.search(r"in use by process \d+ on .*; waiting for it to end", said[0])


def test_the_lock_of_a_folder_that_was_replaced_meanwhile_is_not_taken_for_its_successors(tmp_path: Path, monkeypatch):
    folder, flock = tmp_path / "run", fcntl.flock
    folder.mkdir()

    def replaced_before(descriptor: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        folder.rename(tmp_path / "old")
        folder.mkdir()
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", replaced_before)
    monkeypatch.setattr(module, "POLL_S", 0.0)
    with folder_lock(folder, wait_s=20, say=lambda text: None):
        with pytest.raises(ValueError, match="in use by process"), folder_lock(folder):
            raise AssertionError
        with folder_lock(tmp_path / "old"):
            pass


def test_a_file_system_without_locks_is_said_and_one_that_cannot_be_written_refused(tmp_path: Path, monkeypatch):
    def no_locks(*about):
        raise OSError(errno.ENOSYS, "Function not implemented")

    said: list[str] = []
    monkeypatch.setattr(fcntl, "flock", no_locks)
    with folder_lock(tmp_path, say=said.append):
        assert said == [
            f"{tmp_path}: its file system has no locks (Function not implemented). Do not start a second process there"
        ]
    with (
        pytest.raises(ValueError, match="absent/lock cannot be opened: No such file"),
        folder_lock(tmp_path / "absent"),
    ):
        raise AssertionError


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(start, "collect_provenance", lambda *about: {})
    monkeypatch.setattr(start, "log_to_file", lambda *about, **how: None)
    return load_recipe(RECIPE, [f"run.dir={tmp_path}", "run.name=demo"])


@pytest.mark.parametrize("how", [{}, {"resume": True}, {"overwrite": True}], ids=str)
def test_nobody_else_opens_a_run_that_lives_and_its_folder_stays_as_it_is(tmp_path: Path, loaded, how):
    with start.open_run(loaded, Progress(0)) as run:
        run.metrics.write_text("kept")
        before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
        refused = f"{run.path} is in use by process {os.getpid()} on .* End that process first"
        with pytest.raises(ValueError, match=refused), start.open_run(loaded, Progress(0), **how):
            raise AssertionError
        assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before
        assert [path.name for path in tmp_path.iterdir()] == ["demo"]
    with start.open_run(loaded, Progress(0), resume=True):
        pass


@pytest.mark.parametrize("how", [{"resume": None}, {"job": "7"}], ids=str)
def test_an_attempt_of_a_queued_job_waits_for_the_one_before(tmp_path: Path, loaded, monkeypatch, how):
    monkeypatch.setattr(start, "ATTEMPT_WAITS_S", 0.05)
    monkeypatch.setattr(module, "POLL_S", 0.01)
    said: list[str] = []
    progress = Progress(0)
    monkeypatch.setattr(progress, "say", said.append)
    with start.open_run(loaded, progress, job="7") as run:
        with pytest.raises(ValueError, match="is in use by process"), start.open_run(loaded, progress, **how):
            raise AssertionError
        assert len(said) == 1
        assert "waiting for it to end" in said[0]
        assert run.path.is_dir()
        assert [path.name for path in tmp_path.iterdir()] == ["demo"]


def test_a_run_that_replaces_another_holds_the_lock_of_the_new_folder(tmp_path: Path, loaded):
    with start.open_run(loaded, Progress(0)):
        pass
    with start.open_run(loaded, Progress(0), overwrite=True) as run:
        with pytest.raises(ValueError, match="in use"), folder_lock(run.path):
            raise AssertionError
        assert [path.name for path in tmp_path.iterdir()] == ["demo"]
    # Without a checkpoint it is put aside, and the new one is held.
    with start.open_run(loaded, Progress(0), resume=None) as run:
        with pytest.raises(ValueError, match="in use"), folder_lock(run.path):
            raise AssertionError
        assert {path.name for path in tmp_path.iterdir()} == {"demo", "demo.attempt_000"}


def test_a_fork_gives_up_the_locks_that_it_did_not_take(tmp_path: Path, monkeypatch):
    closed = []
    monkeypatch.setattr(module, "_held", {5, 7})
    with folder_lock(tmp_path):
        assert len(module._held) == 3
    assert module._held == {5, 7}
    monkeypatch.setattr(module.os, "close", closed.append)
    module._close_held()
    assert (sorted(closed), module._held) == ([5, 7], set())


def test_who_waits_for_a_lock_gives_up_at_its_deadline_and_says_once_for_whom_it_waits(tmp_path: Path, monkeypatch):
    now, said = [10.0], []
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds))
    with folder_lock(tmp_path):
        monkeypatch.setattr(module, "time", clock)
        with (
            pytest.raises(ValueError, match="End that process first"),
            folder_lock(tmp_path, wait_s=3.0, say=said.append),
        ):
            raise AssertionError
    assert (now[0], len(said)) == (13.0, 1)


def test_a_resumed_run_says_what_changed_since_its_newest_attempt(tmp_path: Path, loaded, monkeypatch):
    def resumed(steps: int) -> list[str]:
        said: list[str] = []
        progress = Progress(0)
        monkeypatch.setattr(progress, "say", said.append)
        of_attempt = load_recipe(RECIPE, [f"run.dir={tmp_path}", "run.name=demo", f"steps={steps}"])
        with start.open_run(of_attempt, progress, resume=True):
            return said

    with start.open_run(loaded, Progress(0)):
        pass
    first = loaded.recipe.steps
    assert resumed(4) == [f"setting changed since the last attempt: steps: {first} -> 4"]
    assert resumed(4) == []
    assert resumed(first) == [f"setting changed since the last attempt: steps: 4 -> {first}"]
