"""How the processes that compare answers are asked, with stand-ins for them, and what they do."""

import io
import json
import sys
from types import SimpleNamespace

import psutil
import pytest

from slimrl.base.answering_process import ProcessFailed
from slimrl.rewards import comparers, comparison, limited_processes, limited_program
from slimrl.rewards.comparers import Comparers


class Process:
    """Answers what it is told to, and has so much memory then."""

    def __init__(self, start, *, answers, sizes, **how) -> None:
        self.start, self.answers, self.sizes, self.how, self.asked, self.lives = start, answers, sizes, how, [], True

    def wait_ready(self) -> None:
        self.asked.append("ready")

    def ask(self, request):
        self.asked.append(request)
        return self.answers.pop(0)

    @property
    def resident_bytes(self) -> int:
        return self.sizes.pop(0)

    def end(self) -> None:
        self.lives = False


@pytest.fixture
def processes(monkeypatch):
    """Those that were started, each of which answers what the next script says."""
    started, scripts = [], []

    def made(start, **how):
        answers, sizes = scripts.pop(0)
        started.append(Process(start, answers=answers, sizes=sizes or [0] * len(answers), **how))
        return started[-1]

    monkeypatch.setattr(limited_processes, "AnsweringProcess", made)
    return SimpleNamespace(started=started, scripts=scripts)


def test_one_process_is_started_with_its_limits_and_asked_for_pairs(processes, monkeypatch):
    processes.scripts.append(([True, False], None))
    shared = Comparers(max_processes=2, cpu_limit_s=7, deadline_s=3.0)
    assert shared.equivalent("a", "b") is True
    assert shared.equivalent("c\n", "\\d") is False
    (process,) = processes.started
    assert process.asked == ["ready", ["a", "b"], ["c\n", "\\d"]]
    assert process.how == {
        "work": "compares answers",
        "over_limit": "the comparison took more than 7 s of CPU time",
        "deadline_s": 3.0,
    }
    monkeypatch.setattr(psutil, "Popen", lambda command, **how: (command, how))
    command, how = process.start(11, 12)
    assert how == {"stdin": 11, "stdout": 12, "start_new_session": True}
    assert command[:2] == [sys.executable, "-P"]
    assert command[2].endswith("rewards/limited_program.py")
    assert command[3].endswith("rewards/comparison.py")
    assert command[4:] == ["7", str(limited_processes.MEMORY_BYTES)]


def test_an_exception_of_one_comparison_is_named_and_its_process_goes_on(processes):
    processes.scripts.append((["TypeError: no truth", True], None))
    shared = Comparers(max_processes=1)
    with pytest.raises(ProcessFailed, match="the comparison failed: TypeError: no truth"):
        shared.equivalent("a", "b")
    assert shared.equivalent("a", "b") is True
    assert len(processes.started) == 1


def test_a_process_that_has_grown_is_replaced(processes):
    processes.scripts += [
        ([True, False], [limited_processes.KEPT_BYTES, limited_processes.KEPT_BYTES + 1]),
        ([True], None),
    ]
    shared = Comparers(max_processes=1)
    assert [shared.equivalent("a", "b") for _ in range(3)] == [True, False, True]
    assert [process.lives for process in processes.started] == [False, True]


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
    monkeypatch.setattr(limited_processes.os, "sched_getaffinity", lambda pid: {0, 3, 4})
    comparers.close_comparers()
    first = comparers.shared_comparers()
    assert comparers.shared_comparers() is first
    comparers.close_comparers()
    comparers.close_comparers()
    monkeypatch.setattr(limited_processes.os, "sched_getaffinity", lambda pid: set(range(64)))
    assert comparers.shared_comparers() is made[1]
    assert [(one.max_processes, one.closed) for one in made] == [(3, 1), (8, 0)]


def test_a_comparison_has_so_much_cpu_time_from_where_it_begins(monkeypatch):
    limits = [(500, 900)]
    monkeypatch.setattr(limited_program.resource, "getrlimit", lambda which: limits[0])
    monkeypatch.setattr(limited_program.resource, "setrlimit", lambda which, limit: limits.append((which, limit)))
    monkeypatch.setattr(limited_program.time, "process_time", lambda: 12.3)
    with limited_program.cpu_limit(5):
        assert limits[1:] == [(limited_program.resource.RLIMIT_CPU, (18, 900))]
    assert limits[2:] == [(limited_program.resource.RLIMIT_CPU, (500, 900))]


def test_the_process_says_that_it_is_ready_and_answers_each_line(monkeypatch):
    answers, moved, asked, limits = io.StringIO(), [], [], []
    flushed = []
    answers.flush = lambda: flushed.append(answers.getvalue())
    monkeypatch.setattr(limited_program.os, "dup", lambda descriptor: 77)
    monkeypatch.setattr(limited_program.os, "dup2", lambda source, target: moved.append((source, target)))
    monkeypatch.setattr(limited_program.os, "fdopen", lambda descriptor, mode: answers if descriptor == 77 else None)
    monkeypatch.setattr(limited_program.resource, "setrlimit", lambda which, limit: limits.append((which, limit)))
    monkeypatch.setattr(limited_program.time, "process_time", lambda: 0.5)

    def compare(request):
        a, b = request
        asked.append((a, b))
        if a == "1/":
            raise TypeError("no truth")
        return a == b or a.startswith("2")

    work = {"answer": compare, "WARM_UP": comparison.WARM_UP}
    monkeypatch.setattr(limited_program.runpy, "run_path", lambda file, run_name: work)
    stream = lambda number: SimpleNamespace(fileno=lambda: number)  # noqa: E731
    lines = [json.dumps(pair) + "\n" for pair in (["x", "x"], ["1/", "y"], ["x", "y"])]
    monkeypatch.setattr(limited_program, "sys", SimpleNamespace(
        stdout=stream(11), stderr=stream(12), stdin=lines, argv=["program.py", "comparison.py", "9", "1000000000"]
    ))  # fmt: skip
    limited_program.main()
    assert answers.getvalue() == 'true\ntrue\n"TypeError: no truth"\nfalse\n'
    # Who asked waits for each of them.
    assert flushed == ["true\n", "true\ntrue\n", 'true\ntrue\n"TypeError: no truth"\n', answers.getvalue()]
    assert moved == [(12, 11)]
    assert asked[1:] == [("x", "x"), ("1/", "y"), ("x", "y")]
    assert limits[0] == (limited_program.resource.RLIMIT_CORE, (0, 0))
    which, (soft, hard) = limits[1]
    assert which == limited_program.resource.RLIMIT_AS
    assert soft == hard
    added_bytes = soft - psutil.Process().memory_info().vms
    assert abs(added_bytes - 10**9) < 10**8
    assert [limit[0] for which, limit in limits[2::2]] == [10, 10, 10]
