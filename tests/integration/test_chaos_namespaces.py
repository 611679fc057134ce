"""A command with processes, mounts and a network of its own: all of them end with it, however it ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from isolation import NAMESPACES, what_is_missing

from slimrl.base.processes import lives

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(120),
    pytest.mark.skipif(what_is_missing() is not None, reason=str(what_is_missing())),
]

PROGRAM = """
import os, signal, subprocess, sys, time
from pathlib import Path
sys.path.insert(0, {benchmarks!r})
from chaos_namespaces import PRIVATE, run_inside

def ended(*_):
    Path({folder!r}, "ended").touch()
    sys.exit(3)

if PRIVATE not in os.environ:
    sys.exit(run_inside())
signal.signal(signal.SIGTERM, ended)
Path("/dev/shm/of_this_namespace").touch()
# Orphans, whose parents end at once; the exit code of the second one is taken.
subprocess.run(["sh", "-c", "setsid sleep {seconds} &"])
orphan = subprocess.run(["sh", "-c", "setsid sleep 0.1 & echo $!"], stdout=subprocess.PIPE, text=True).stdout.strip()
while Path("/proc", orphan).exists():
    time.sleep(0.05)
Path({folder!r}, "begun").touch()
time.sleep({seconds})
"""


@pytest.fixture
def command(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """One that sleeps, and has an orphan that sleeps."""
    file = tmp_path / "command.py"
    file.write_text(PROGRAM.format(benchmarks=str(NAMESPACES.parent), folder=str(tmp_path), seconds=1000 + os.getpid()))
    process = subprocess.Popen([sys.executable, str(file)])
    yield process
    process.kill()
    process.wait()


def wait(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 3), (signal.SIGKILL, -9)])
def test_what_a_command_has_started_ends_with_it(
    command: subprocess.Popen[bytes], tmp_path: Path, number: signal.Signals, code: int
):
    wait(lambda: (tmp_path / "begun").exists())
    family = psutil.Process(command.pid).children(recursive=True)
    assert [one.name() for one in family].count("sleep") == 1
    assert not Path("/dev/shm/of_this_namespace").exists()
    command.send_signal(number)
    assert command.wait(30) == code
    wait(lambda: not any(lives(one) for one in family))
    assert (tmp_path / "ended").exists() == (number == signal.SIGTERM)
