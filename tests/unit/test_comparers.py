"""How the processes that compare answers are started, asked, replaced and ended, with stand-ins for them."""

import asyncio
import io
import json
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import psutil
import pytest

from slimrl.rewards import comparers, comparison
from slimrl.rewards.comparers import ComparerFailed, Comparers, OutOfCpuTime
from slimrl.rewards.deadline import within
from slimrl.rewards.scoring import call_reward


class Process:
    """Answers what it is told to, line by line; with None it is stuck, with a number it ends by that code."""

    def __init__(self, command, answers) -> None:
        self.command, self.answers, self.asked = command, [True, *answers], []
        self.pid, self.code, self.waited, self.killed = 100 + len(answers), None, [], 0
        self.closed = []
        self.stdin = SimpleNamespace(write=self.ask, flush=lambda: self.asked.append("sent"), close=self.close)
        self.stdout = SimpleNamespace(readline=self.answer, close=lambda: self.closed.append("stdout"))

    def close(self) -> None:
        self.closed.append("stdin")
        # What was written and not read is left in the pipe.
        raise BrokenPipeError

    def ask(self, line: bytes) -> None:
        if self.code is not None or self.answers == ["broken pipe"]:
            self.code = self.code if self.code is not None else 4
            raise BrokenPipeError
        assert line.endswith(b"\n")
        self.asked.append(json.loads(line))

    def answer(self) -> bytes:
        answer = self.answers.pop(0)
        if isinstance(answer, bool | str):
            return json.dumps(answer).encode() + b"\n"
        self.code = answer
        return b""

    def poll(self) -> int | None:
        return self.code

    def kill(self) -> None:
        self.killed += 1
        if self.code is None:
            self.code = -9

    def wait(self, timeout_s: float) -> int:
        self.waited.append(timeout_s)
        return self.code


@pytest.fixture
def processes(monkeypatch):
    """Those that were started, each of which answers what the next script says."""
    started, scripts, polled = [], [], []

    def start(command, **how):
        assert how == {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "start_new_session": True}
        started.append(Process(command, scripts.pop(0)))
        return started[-1]

    class Poll:
        def register(self, stream, event) -> None:
            self.stream = stream

        def poll(self, milliseconds: float) -> bool:
            polled.append(milliseconds)
            (process,) = [one for one in started if one.stdout is self.stream]
            return process.answers[:1] != [None]

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(comparers.select, "poll", Poll)
    return SimpleNamespace(started=started, scripts=scripts, polled=polled)


def test_one_process_answers_one_pair_after_the_other(processes):
    processes.scripts += [[True, False]]
    shared = Comparers(max_processes=2, cpu_limit_s=7, deadline_s=3.0)
    assert (shared.pids, processes.started) == ([], [])
    assert shared.equivalent("a", "b") is True
    assert shared.equivalent("c\n", "\\d") is False
    (process,) = processes.started
    assert process.asked == [["a", "b"], "sent", ["c\n", "\\d"], "sent"]
    assert process.command[:2] == [sys.executable, "-P"]
    assert process.command[2].endswith("rewards/comparison.py")
    assert process.command[3:] == ["7", str(comparers.MEMORY_BYTES)]
    assert processes.polled == [3000.0] * 3
    assert shared.pids == [process.pid]
    shared.close()
    assert (process.killed, process.waited) == (1, [comparers.END_S])
    assert shared.pids == []
    with pytest.raises(ComparerFailed, match="the run is ending"):
        shared.equivalent("a", "b")
    assert len(processes.started) == 1


@pytest.mark.parametrize(
    ("end", "error", "said"),
    [
        (-signal.SIGXCPU, OutOfCpuTime, "the comparison took more than 7 s of CPU time"),
        (-signal.SIGKILL, ComparerFailed, "ended by SIGKILL"),
        (3, ComparerFailed, "ended with code 3"),
        (0, ComparerFailed, "ended with code 0"),
        ("broken pipe", ComparerFailed, "ended with code 4"),
        (None, ComparerFailed, "did not respond within 3 s"),
    ],
)
def test_a_process_that_ends_or_is_stuck_is_named_and_replaced(processes, end, error, said):
    processes.scripts += [[end], [True]]
    shared = Comparers(max_processes=1, cpu_limit_s=7, deadline_s=3.0)
    with pytest.raises(error, match=said):
        shared.equivalent("a", "b")
    assert processes.started[0].killed == (1 if end is None else 0)
    assert processes.started[0].closed == ([] if end is None else ["stdout", "stdin"])
    assert shared.equivalent("a", "b") is True
    assert shared.pids == [processes.started[1].pid]
    shared.close()
    # The one that has ended is no longer known.
    assert [process.killed for process in processes.started] == [1 if end is None else 0, 1]


def test_an_exception_of_one_comparison_is_named_and_its_process_goes_on(processes):
    processes.scripts += [["TypeError: no truth", True]]
    shared = Comparers(max_processes=1)
    with pytest.raises(ComparerFailed, match="the comparison failed: TypeError: no truth"):
        shared.equivalent("a", "b")
    assert shared.equivalent("a", "b") is True
    assert len(processes.started) == 1
    shared.close()


def test_at_most_so_many_compare_at_once_and_one_that_runs_is_taken_first(processes):
    asked, go_on = threading.Semaphore(0), threading.Semaphore(0)
    processes.scripts += [[True] * 9, [True] * 9]
    shared = Comparers(max_processes=2)
    assert shared.equivalent("a", "b")
    assert shared.equivalent("a", "b")
    assert len(processes.started) == 1
    reading = Process.answer

    def slow(self) -> bytes:
        asked.release()
        assert go_on.acquire(timeout=10)
        return reading(self)

    for process in processes.started:
        process.stdout.readline = lambda process=process: slow(process)
    threads = [threading.Thread(target=shared.equivalent, args=("a", "b")) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert asked.acquire(timeout=10)
    for _ in range(3):
        go_on.release()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)
    assert len(processes.started) == 2


def test_the_shared_ones_are_made_once_and_anew_after_their_end(monkeypatch):
    made = []

    class StandIn:
        def __init__(self, *, max_processes: int) -> None:
            self.max_processes, self.closed = max_processes, 0
            made.append(self)

        def close(self) -> None:
            self.closed += 1

    monkeypatch.setattr(comparers, "Comparers", StandIn)
    monkeypatch.setattr(comparers, "_shared", None)
    monkeypatch.setattr(comparers.os, "sched_getaffinity", lambda pid: {0, 3, 4})
    comparers.close_comparers()
    first = comparers.shared_comparers()
    assert comparers.shared_comparers() is first
    comparers.close_comparers()
    comparers.close_comparers()
    monkeypatch.setattr(comparers.os, "sched_getaffinity", lambda pid: set(range(64)))
    assert comparers.shared_comparers() is made[1]
    assert [(one.max_processes, one.closed) for one in made] == [(3, 1), (8, 0)]


def test_a_comparison_has_so_much_cpu_time_from_where_it_begins(monkeypatch):
    limits = [(500, 900)]
    monkeypatch.setattr(comparison.resource, "getrlimit", lambda which: limits[0])
    monkeypatch.setattr(comparison.resource, "setrlimit", lambda which, limit: limits.append((which, limit)))
    monkeypatch.setattr(comparison.time, "process_time", lambda: 12.3)
    with comparison.cpu_limit(5):
        assert limits[1:] == [(comparison.resource.RLIMIT_CPU, (18, 900))]
    assert limits[2:] == [(comparison.resource.RLIMIT_CPU, (500, 900))]


def test_the_process_says_that_it_is_ready_and_answers_each_line(monkeypatch):
    answers, moved, asked, limits = io.StringIO(), [], [], []
    flushed = []
    answers.flush = lambda: flushed.append(answers.getvalue())
    monkeypatch.setattr(comparison.os, "dup", lambda descriptor: 77)
    monkeypatch.setattr(comparison.os, "dup2", lambda source, target: moved.append((source, target)))
    monkeypatch.setattr(comparison.os, "fdopen", lambda descriptor, mode: answers if descriptor == 77 else None)
    monkeypatch.setattr(comparison.resource, "setrlimit", lambda which, limit: limits.append((which, limit)))
    monkeypatch.setattr(comparison.time, "process_time", lambda: 0.5)

    def compare(a, b):
        asked.append((a, b))
        if a == "1/":
            raise TypeError("no truth")
        return a == b or a.startswith("2")

    monkeypatch.setattr(comparison, "equivalent", compare)
    stream = lambda number: SimpleNamespace(fileno=lambda: number)  # noqa: E731
    lines = [json.dumps(pair) + "\n" for pair in (["x", "x"], ["1/", "y"], ["x", "y"])]
    monkeypatch.setattr(comparison, "sys", SimpleNamespace(
        stdout=stream(11), stderr=stream(12), stdin=lines, argv=["comparison.py", "9", "1000000000"]
    ))  # fmt: skip
    comparison.main()
    assert answers.getvalue() == 'true\ntrue\n"TypeError: no truth"\nfalse\n'
    # Who asked waits for each of them.
    assert flushed == ["true\n", "true\ntrue\n", 'true\ntrue\n"TypeError: no truth"\n', answers.getvalue()]
    assert moved == [(12, 11)]
    assert asked[1:] == [("x", "x"), ("1/", "y"), ("x", "y")]
    assert limits[0] == (comparison.resource.RLIMIT_CORE, (0, 0))
    which, (soft, hard) = limits[1]
    assert which == comparison.resource.RLIMIT_AS
    assert soft == hard
    added_bytes = soft - psutil.Process().memory_info().vms
    assert abs(added_bytes - 10**9) < 10**8
    assert [limit[0] for which, limit in limits[2::2]] == [10, 10, 10]


def test_a_process_that_has_grown_is_replaced(processes, monkeypatch):
    sizes = [comparers.KEPT_BYTES, comparers.KEPT_BYTES + 1, 0]
    monkeypatch.setattr(comparers._Comparer, "resident_bytes", property(lambda _: sizes.pop(0)))
    processes.scripts += [[True, False], [True]]
    shared = Comparers(max_processes=1)
    assert [shared.equivalent("a", "b") for _ in range(3)] == [True, False, True]
    assert [process.killed for process in processes.started] == [1, 0]
    shared.close()


async def test_the_turn_of_an_answer_does_not_count_against_its_deadline(processes):
    processes.scripts += [[True]]
    shared = Comparers(max_processes=1)
    slot = shared._slots.get()
    threading.Timer(0.6, lambda: shared._slots.put(slot)).start()
    scored = within(call_reward(lambda *_: shared.equivalent("a", "b"), None, None), 0.3, "no reward")
    assert await scored is True
    shared.close()


def test_a_turn_that_never_comes_is_said(processes, monkeypatch):
    monkeypatch.setattr(comparers, "TURN_S", 0.05)
    shared = Comparers(max_processes=1)
    shared._slots.get()
    with pytest.raises(ComparerFailed, match=r"no process that compares answers was free within 0\.05 s"):
        shared.equivalent("a", "b")


def test_a_turn_may_take_long_while_others_get_theirs(processes, monkeypatch):
    monkeypatch.setattr(comparers, "TURN_S", 1.5)
    processes.scripts += [[True] * 9]
    shared = Comparers(max_processes=1)
    reading = Process.answer
    monkeypatch.setattr(Process, "answer", lambda self: time.sleep(0.3) or reading(self))
    with ThreadPoolExecutor(9) as pool:
        # The last of them waits for 2.4 s and more.
        assert list(pool.map(lambda _: shared.equivalent("a", "b"), range(9))) == [True] * 9
    shared.close()


async def test_a_call_that_was_cancelled_takes_no_process_when_its_turn_comes(processes):
    shared = Comparers(max_processes=1)
    slot = shared._slots.get()
    ended = threading.Event()

    def ask(*_):
        try:
            return shared.equivalent("a", "b")
        finally:
            ended.set()

    scored = asyncio.ensure_future(within(call_reward(ask, None, None), 9.0, "no reward"))
    await asyncio.sleep(0.2)
    scored.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scored
    assert not ended.is_set()
    shared._slots.put(slot)
    assert await asyncio.to_thread(ended.wait, 9)
    assert processes.started == []
    # Its place is free for the next one.
    assert shared._slots.get(timeout=9) is None
