"""A task's own code in a thread: whatever it raises reaches the coroutine that waits."""

import asyncio
import sys
import threading
from types import SimpleNamespace

import pytest

from slimrl.base import threads
from slimrl.base.threads import ReusedThreads, TaskCodeExited, end_process_if_calls_hang, in_thread, task_threads


def raises(error):
    def call():
        raise error

    return call


async def test_an_error_is_raised_as_it_is():
    error = ValueError("no")
    with pytest.raises(ValueError, match="no") as caught:
        await asyncio.wait_for(in_thread(raises(error)), 5)
    assert caught.value is error


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), StopIteration(1)])
async def test_what_is_no_ordinary_error_is_named_at_once(error):
    with pytest.raises(TaskCodeExited) as caught:
        await asyncio.wait_for(in_thread(raises(error)), 5)
    assert repr(error) in str(caught.value)
    assert caught.value.__cause__ is error


async def test_code_that_calls_exit_is_named_at_once():
    with pytest.raises(TaskCodeExited, match=r"SystemExit\('bye'\)"):
        await asyncio.wait_for(in_thread(lambda: sys.exit("bye")), 5)


def noted_ends(monkeypatch):
    """What the end of this process would be, in order."""
    events: list[object] = []
    monkeypatch.setattr(threads.os, "_exit", lambda code: events.append(code))
    monkeypatch.setattr(threads.atexit, "_run_exitfuncs", lambda: events.append("atexit"))
    monkeypatch.setattr(threads.logging, "shutdown", lambda: events.append("logging"))
    for name in ("stdout", "stderr"):
        stream = SimpleNamespace(flush=lambda name=name: events.append(name))
        monkeypatch.setattr(threads.sys, name, stream)
    return events


async def test_a_process_whose_task_hangs_ends_by_its_code_after_everything_else(monkeypatch):
    ends = noted_ends(monkeypatch)
    release = threading.Event()
    hanging = in_thread(lambda: release.wait(20))
    try:
        (thread,) = task_threads()
        assert thread.daemon
        end_process_if_calls_hang(3)
        assert ends == ["atexit", "logging", "stdout", "stderr", 3]
    finally:
        release.set()
    assert await hanging is True
    thread.join(10)
    assert task_threads() == []
    end_process_if_calls_hang(4)
    assert len(ends) == 5


async def test_what_comes_after_a_call_was_given_up_is_dropped():
    release = threading.Event()
    future = in_thread(lambda: release.wait(20))
    future.cancel()
    release.set()
    for thread in task_threads():
        thread.join(10)
    await asyncio.sleep(0)
    assert future.cancelled()


async def test_calls_that_follow_each_other_share_a_thread_and_one_that_hangs_keeps_its_own(monkeypatch):
    monkeypatch.setattr(threads, "IDLE_S", 60.0)
    reused, release = ReusedThreads(), threading.Event()
    first = await reused.run(threading.current_thread)
    while first in task_threads():
        await asyncio.sleep(0.001)
    hanging = reused.run(lambda: release.wait(20) and threading.current_thread())
    others = await asyncio.wait_for(asyncio.gather(*(reused.run(threading.current_thread) for _ in range(3))), 5)
    assert first not in others
    async with asyncio.timeout(10):
        # Their calls have ended a moment before they count as idle.
        while task_threads() != [first]:
            await asyncio.sleep(0.001)
    with pytest.raises(TaskCodeExited, match="SystemExit"):
        await reused.run(lambda: sys.exit("bye"))
    monkeypatch.setattr(threads, "IDLE_S", 0.2)
    release.set()
    assert await hanging is first
    first.join(10)
    assert not first.is_alive(), "it ends when it has no call for a while"
    assert await reused.run(threading.current_thread) is not first
