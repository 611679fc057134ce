"""The lock of a run folder goes with the process that holds it, however that one ends and whatever it leaves."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slimrl.base.folder_lock import folder_lock

HOLD = """
import sys
from pathlib import Path
from slimrl.base.folder_lock import folder_lock
with folder_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_the_kernel_gives_back_the_lock_of_a_process_that_is_killed(tmp_path: Path):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=f"process {holder.pid} on"), folder_lock(tmp_path):
            raise AssertionError
        holder.send_signal(signal.SIGKILL)
        assert holder.wait(20) == -signal.SIGKILL
    with folder_lock(tmp_path):
        assert f"process {os.getpid()} " in (tmp_path / "lock").read_text()


def sleeping_fork() -> int:
    """Process id of a copy of this process that waits for a signal."""
    if pid := os.fork():
        return pid
    signal.pause()
    os._exit(0)


def sleeping_program() -> int:
    return os.posix_spawnp("sleep", ["sleep", "60"], os.environ)


@pytest.mark.parametrize("start_child", [sleeping_fork, sleeping_program])
def test_a_child_that_outlives_the_holder_does_not_keep_the_lock(tmp_path: Path, start_child):
    with folder_lock(tmp_path):
        child = start_child()
    try:
        # A program's descriptors are closed when it begins, a fork's a moment after it was made.
        with folder_lock(tmp_path, wait_s=10, say=lambda text: None):
            assert os.waitpid(child, os.WNOHANG) == (0, 0)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
