"""Several worker processes: what each way of failing looks like from outside, and that nothing is left running."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import failing_workers
import pytest
from slimrl_tools.convert.workers import run_workers

pytestmark = [pytest.mark.integration, pytest.mark.timeout(90)]

SECONDS = 40.0
"""Until a failure is told. The worker beside it would go on for 60; to start takes some."""


def test_every_part_is_worked_on_and_all_progress_is_told(tmp_path):
    done = []
    run_workers(failing_workers.work, [str(tmp_path / "a"), str(tmp_path / "b")], done.append)
    assert sum(done) == 10
    assert {file.name for file in tmp_path.iterdir()} == {"a", "b"}


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        pytest.param("ValueError", ValueError, "^broken source$", marks=pytest.mark.full),
        pytest.param("OSError", OSError, "No space left on device: 'out/file'", marks=pytest.mark.full),
        ("not to be pickled", OSError, "^out/file: lost$"),
        pytest.param("bug", RuntimeError, "in work\n(.|\n)*a mistake of ours", marks=pytest.mark.full),
        ("exit", ChildProcessError, "ended with code 0 before it was done"),
        ("SIGKILL", ChildProcessError, "ended by SIGKILL; the memory may have run out"),
    ],
)
def test_a_worker_that_fails_ends_the_others_at_once(how, error, message):
    start = time.monotonic()
    with pytest.raises(error, match=message):
        run_workers(failing_workers.work, ["wait", how], lambda _: None)
    assert time.monotonic() - start < SECONDS
    assert not multiprocessing.active_children()


INTERRUPTED = """
import signal
import sys
sys.path.insert(0, sys.argv[1])
import failing_workers
from slimrl_tools.convert.workers import run_workers
if __name__ == "__main__":
    # Tests that run in a shell's background are told to ignore it, and so is all that they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run_workers(failing_workers.work, ["wait", "wait"], lambda _: print("working", flush=True))
"""


@pytest.mark.full
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_their_parent(tmp_path, by):
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED)
    command = [sys.executable, str(script), str(Path(__file__).parent)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "working\n"
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        assert len(children) >= 2
        parent.send_signal(by)
        assert parent.wait(timeout=30) == -by
    finally:
        parent.kill()
        parent.wait(timeout=10)
    deadline = time.monotonic() + 30
    while any(_alive(int(child)) for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
