"""What a process takes of memory, as seen from outside."""

import os
import threading
from pathlib import Path

import numpy as np

from slimrl.ipc.shared_buffer import FileBuffer
from slimrl.observability import memory
from slimrl.observability.memory import MemoryWatch, memory_bytes, session_members, shared_bytes

MB = 2**20


def test_the_peak_counts_and_not_what_is_left_at_the_end():
    with MemoryWatch([os.getpid()]) as memory:
        taken = np.ones(64 * MB, np.uint8)
        held = memory_bytes(os.getpid(), "RssAnon")
        # The watch looks every hundredth of a second.
        while memory.extra_bytes < 60 * MB:
            assert memory_bytes(os.getpid(), "RssAnon") >= held - MB
        del taken
    assert 60 * MB < memory.extra_bytes < 80 * MB
    assert memory_bytes(os.getpid(), "RssAnon") < held - 60 * MB
    assert "memory-watch" not in [thread.name for thread in threading.enumerate()]


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
