"""What a killed driver leaves of its private cluster ends within seconds; nothing else does."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from slimrl.resync.ipc.shared_buffer import SHARED_MEMORY_DIR

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

DRIVER = """
import os, psutil, subprocess, sys
from pathlib import Path
from slimrl.runtime.cluster.guard import guarded
folder = Path(sys.argv[1])
(folder / "tmp").mkdir(parents=True)
command = [sys.executable, "-c", "import time; time.sleep(300)"]
with guarded(folder, folder / "tmp"):
    member, other = (
        subprocess.Popen(command, env={**os.environ, "TMPDIR": str(tmp)}, stdout=subprocess.DEVNULL)
        for tmp in (folder / "tmp", folder)
    )
    print(member.pid, other.pid, *(child.pid for child in psutil.Process().children()), flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def driver(tmp_path: Path):
    """(the driver, what belongs to the cluster, what does not, the guard); they are gone after the test."""
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path / "cluster")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    member, other, *children = map(int, process.stdout.readline().split())
    (guard,) = set(children) - {member, other}
    processes = [psutil.Process(pid) for pid in (member, other, guard)]
    yield process, *processes
    process.kill()
    for each in processes:
        if each.is_running():
            each.kill()
    process.communicate(timeout=10)


def ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_what_a_killed_driver_leaves_ends_with_its_files(driver, tmp_path: Path):
    process, member, other, guard = driver
    # As a trainer rank names a buffer, which nobody locks any more.
    segment = SHARED_MEMORY_DIR / f"slimrl-{tmp_path.name}-{member.pid}-0"
    segment.write_bytes(b"left")
    start = time.monotonic()
    process.send_signal(signal.SIGKILL)
    while not (ended(member) and ended(guard)) and time.monotonic() < start + 60:
        time.sleep(0.1)
    assert ended(member)
    assert ended(guard)
    assert not ended(other)
    assert not segment.exists()
    assert not (tmp_path / "cluster").exists()


def test_a_driver_that_ends_its_cluster_itself_takes_its_guard_along(driver, tmp_path: Path):
    process, member, _, guard = driver
    process.communicate("\n", timeout=30)
    assert process.returncode == os.EX_OK
    assert ended(guard)
    assert not ended(member)
    assert (tmp_path / "cluster").is_dir()
