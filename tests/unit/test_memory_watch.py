"""What a process takes of memory, as seen from outside."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

from slimrl.observability import memory
from slimrl.observability.memory import MemoryWatch, memory_bytes, session_members, shared_bytes
from slimrl.resync.ipc.shared_buffer import FileBuffer

MB = 2**20
TAKES_AND_GIVES_BACK = f"""
import sys

def step():
    print(flush=True)
    sys.stdin.readline()

step()
taken = bytearray({64 * MB})
step()
del taken
step()
"""


def test_the_peak_counts_and_not_what_is_left_at_the_end():
    # In a process of its own: what earlier tests have left to be freed would be taken off the growth of this one.
    with subprocess.Popen(
        [sys.executable, "-c", TAKES_AND_GIVES_BACK],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
    ) as child:
        child.stdout.readline()
        with MemoryWatch([child.pid]) as memory:
            before = memory_bytes(child.pid, "RssAnon")
            _answer(child)
            # The watch looks every hundredth of a second.
            deadline = time.monotonic() + 60
            while memory.extra_bytes < 60 * MB and time.monotonic() < deadline:
                time.sleep(0.01)
            assert memory_bytes(child.pid, "RssAnon") > before + 60 * MB
            _answer(child)
            assert memory_bytes(child.pid, "RssAnon") < before + 4 * MB
        child.stdin.close()
    assert 60 * MB < memory.extra_bytes < 80 * MB
    assert "memory-watch" not in [thread.name for thread in threading.enumerate()]


def _answer(child: subprocess.Popen[bytes]) -> None:
    """Has the child take its next step, and waits until it has taken it."""
    child.stdin.write(b"\n")
    child.stdout.readline()


def test_a_block_that_takes_and_ends_between_two_looks_is_counted(monkeypatch):
    monkeypatch.setattr(memory, "INTERVAL_S", 1000.0)
    figures = iter([(5, 1), (7, 2), (100, 100)])
    monkeypatch.setattr(memory, "memory_bytes", lambda pid, field: pid * (now := next(figures))[0] + now[1] - now[1])
    monkeypatch.setattr(memory, "shared_bytes", lambda pid: 0)
    with MemoryWatch([10]) as watch:
        assert watch.extra_bytes == 0
    assert watch.extra_bytes == 20


def test_shared_memory_counts_for_the_process_that_made_it_and_once():
    before = shared_bytes(os.getpid())
    with MemoryWatch([os.getpid()]) as memory:
        buffer = FileBuffer(16 * MB, "test-memory")
        buffer.tensor.fill_(1)
        again = np.memmap(Path("/dev/shm") / buffer.segment(), np.uint8, "r")
        assert again.sum(dtype=np.int64) == 16 * MB
        assert shared_bytes(os.getpid()) - before == 16 * MB
        assert shared_bytes(os.getppid()) == 0
    # The end of the block is looked at in any case, also where the thread has had no turn before.
    assert 16 * MB <= memory.extra_bytes < 18 * MB
    buffer.close()
    assert shared_bytes(os.getpid()) == before


def test_processes_that_are_gone_take_nothing():
    assert memory_bytes(2**22 + 1, "RssAnon") == 0
    assert session_members(2**22 + 1) == []
    assert os.getpid() in session_members(os.getsid(0))
