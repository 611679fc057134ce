"""Processes that have ended and nobody has asked about."""

import subprocess
import sys
import time

import psutil
import pytest

from slimrl.base.processes import await_end, lives

SLEEPS = "import time; time.sleep(60)"
FIRST_THREAD_ENDS = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
ctypes.CDLL(None).syscall(60, 0)  # exit of this thread alone, on x86-64
"""


@pytest.fixture
def start():
    started = []

    def of(code: str) -> psutil.Process:
        started.append(subprocess.Popen([sys.executable, "-c", code]))
        return psutil.Process(started[-1].pid)

    yield of
    for process in started:
        process.kill()
        process.wait(20)


def test_a_process_whose_exit_code_nobody_has_taken_has_ended(start):
    process, other = start(SLEEPS), start(SLEEPS)
    assert lives(process)
    process.kill()
    began = time.monotonic()
    assert await_end([process], 20.0) == []
    assert time.monotonic() - began < 10
    assert process.status() == psutil.STATUS_ZOMBIE
    assert await_end([process, other], 0.1) == [other]


def test_a_process_that_is_gone_has_ended(start):
    process = start(SLEEPS)
    process.kill()
    process.wait(20)
    assert not lives(process)
    assert await_end([process], 0.0) == []


def test_a_process_lives_as_long_as_one_of_its_threads(start):
    process = start(FIRST_THREAD_ENDS)
    deadline = time.monotonic() + 20
    while process.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert lives(process)
    process.kill()
    assert await_end([process], 20.0) == []
