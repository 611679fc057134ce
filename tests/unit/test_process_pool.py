"""Which process of a pool answers, and when one is started, waited for, replaced and ended; with stand-ins for them."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from slimrl.base.answering_process import ProcessFailed
from slimrl.base.process_pool import ProcessPool
from slimrl.base.threads import call_task_code
from slimrl.rewards.deadline import within


class Process:
    def __init__(self, pid: int) -> None:
        self.pid, self.lives, self.is_ready = pid, True, False

    def wait_ready(self) -> None:
        self.is_ready = True

    def end(self) -> None:
        self.lives = False


class Pool(ProcessPool):
    """Keeps the processes that it started in `made`."""

    def __init__(self, *, num_processes: int = 1, turn_s: float = 60.0) -> None:
        self.made: list[Process] = []
        super().__init__(self.make, work="adds", num_processes=num_processes, turn_s=turn_s)

    def make(self) -> Process:
        self.made.append(Process(len(self.made)))
        return self.made[-1]

    def pid_of_a_request(self) -> int:
        with self.process() as process:
            assert process.is_ready
            return process.pid


def test_one_that_has_ended_is_replaced_and_known_no_more():
    pool = Pool()
    assert pool.pids == []
    assert [pool.pid_of_a_request() for _ in range(2)] == [0, 0]
    with pytest.raises(ZeroDivisionError), pool.process():
        raise ZeroDivisionError
    assert pool.pids == [0]
    pool.made[0].lives = False
    assert pool.pid_of_a_request() == 1
    assert (pool.pids, len(pool._started)) == ([1], 1)


def test_one_that_does_not_become_ready_is_replaced(monkeypatch: pytest.MonkeyPatch):
    pool = Pool()

    def fail(process: Process) -> None:
        process.lives = False
        raise ProcessFailed("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(Process, "wait_ready", fail)
        with pytest.raises(ProcessFailed, match="no answer"):
            pool.pid_of_a_request()
    assert pool.pid_of_a_request() == 1


def test_at_most_so_many_work_at_once_and_one_that_runs_is_taken_first():
    pool, go_on, at_once = Pool(num_processes=2), threading.Event(), []
    assert [pool.pid_of_a_request() for _ in range(2)] == [0, 0]

    def hold(_: int) -> None:
        with pool.process() as process:
            at_once.append(process.pid)
            assert go_on.wait(20)

    with ThreadPoolExecutor(3) as threads:
        held = threads.map(hold, range(3))
        deadline = time.monotonic() + 20
        while len(at_once) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        assert at_once == [0, 1]
        go_on.set()
        list(held)
    assert len(at_once) == 3
    assert len(pool.made) == 2


def test_after_its_end_a_pool_starts_none():
    pool = Pool(num_processes=2)
    with pool.process(), pool.process():
        pass
    pool.close()
    assert (pool.pids, [process.lives for process in pool.made]) == ([], [False, False])
    with pytest.raises(ProcessFailed, match="the run is ending"):
        pool.pid_of_a_request()
    assert len(pool.made) == 2


async def test_the_turn_of_a_request_does_not_count_against_its_callers_deadline():
    pool = Pool()
    slot = pool._slots.get()
    threading.Timer(0.6, lambda: pool._slots.put(slot)).start()
    scored = within(call_task_code(lambda *_: pool.pid_of_a_request(), None, None), 0.3, "no reward")
    assert await scored == 0


async def test_a_start_does_not_count_against_its_callers_deadline(monkeypatch: pytest.MonkeyPatch):
    pool = Pool()
    monkeypatch.setattr(Process, "wait_ready", lambda process: time.sleep(0.6))
    monkeypatch.setattr(Process, "is_ready", True, raising=False)
    monkeypatch.setattr(Process, "__init__", lambda process, pid: setattr(process, "pid", pid))
    scored = within(call_task_code(lambda *_: pool.pid_of_a_request(), None, None), 0.3, "no reward")
    assert await scored == 0


def test_a_turn_that_never_comes_is_said():
    pool = Pool(turn_s=0.05)
    pool._slots.get()
    with pytest.raises(ProcessFailed, match=r"no process that adds was free within 0\.05 s"):
        pool.pid_of_a_request()


def test_a_turn_may_take_long_while_others_get_theirs():
    pool = Pool(turn_s=1.5)

    def slow(_: int) -> int:
        with pool.process() as process:
            time.sleep(0.3)
            return process.pid

    with ThreadPoolExecutor(9) as threads:
        # The last of them waits for 2.4 s and more.
        assert list(threads.map(slow, range(9))) == [0] * 9


async def test_a_call_that_was_cancelled_takes_no_process_when_its_turn_comes():
    pool = Pool()
    slot = pool._slots.get()
    ended = threading.Event()

    def ask(*_):
        try:
            return pool.pid_of_a_request()
        finally:
            ended.set()

    scored = asyncio.ensure_future(within(call_task_code(ask, None, None), 9.0, "no reward"))
    await asyncio.sleep(0.2)
    scored.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scored
    assert not ended.is_set()
    pool._slots.put(slot)
    assert await asyncio.to_thread(ended.wait, 9)
    assert pool.made == []
    # Its place is free for the next one.
    assert pool._slots.get(timeout=9) is None


def test_a_request_that_is_given_up_takes_no_process():
    pool = Pool()
    with pytest.raises(ProcessFailed, match="nobody waits"), pool.process(lambda: True):
        pytest.fail("a process was given")
    assert pool.made == []
    assert pool.pid_of_a_request() == 0
