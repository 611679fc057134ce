"""How a process that answers lines is asked, and what is said of one that ends or is stuck; with small programs."""

import os
import signal
import sys
import threading
import time

import psutil
import pytest

from slimrl.base.answering_process import AnsweringProcess, OutOfCpuTime, ProcessFailed

READY = "import json, os, signal, sys, time\nprint('true', flush=True)\n"
ECHO = READY + "for line in sys.stdin: print(line, end='', flush=True)"


@pytest.fixture
def start():
    started = []

    def made(code: str, deadline_s: float = 60.0) -> AnsweringProcess:
        command = [sys.executable, "-S", "-c", code]
        started.append(
            AnsweringProcess(
                lambda stdin, stdout: psutil.Popen(command, stdin=stdin, stdout=stdout, start_new_session=True),
                work="adds",
                over_limit="the sum took too long",
                deadline_s=deadline_s,
            )
        )
        return started[-1]

    yield made
    for process in started:
        process.end()


def test_requests_of_any_size_and_text_come_back_as_they_were(start):
    process = start(ECHO)
    process.wait_ready()
    for request in (1, ["\n\ud800", {"a": None}], "x" * 3_000_000, []):
        assert process.ask(request) == request
    assert process.resident_bytes > 1024**2
    assert process.lives
    process.end()
    process.end()
    assert (process.lives, process.resident_bytes) == (False, 0)
    assert not psutil.pid_exists(process.pid)


@pytest.mark.parametrize(
    ("ends", "error", "said"),
    [
        ("sys.exit(3)", ProcessFailed, r"the process that adds ended with code 3$"),
        ("sys.exit(0)", ProcessFailed, r"the process that adds ended with code 0$"),
        ("os.kill(os.getpid(), signal.SIGKILL)", ProcessFailed, r"the process that adds ended by SIGKILL$"),
        ("os.kill(os.getpid(), signal.SIGXCPU)", OutOfCpuTime, r"^the sum took too long$"),
    ],
)
def test_one_that_ends_instead_of_answering_says_how(start, ends: str, error: type[Exception], said: str):
    process = start(f"{READY}sys.stdin.readline()\n{ends}")
    process.wait_ready()
    with pytest.raises(error, match=said):
        process.ask(["a"])
    assert not process.lives
    assert process._requests.closed
    assert process._answers.closed


def test_one_that_has_ended_before_it_is_asked_says_how(start):
    process = start(READY + "sys.exit(4)")
    process.wait_ready()
    psutil.Process(process.pid).wait(20)  # which takes its exit code, as somebody else may
    with pytest.raises(ProcessFailed, match="ended with code 0"):
        process.ask("x" * 100_000)


def test_half_an_answer_is_none(start):
    process = start(READY + "sys.stdin.readline(); sys.stdout.write('[1'); sys.stdout.flush()")
    process.wait_ready()
    with pytest.raises(ProcessFailed, match="ended with code 0"):
        process.ask(1)


@pytest.mark.parametrize("request_bytes", [1, 1_000_000])
def test_one_that_is_stuck_is_ended_at_its_deadline(start, request_bytes: int):
    process = start(READY + "time.sleep(600)", deadline_s=20.0)
    process.wait_ready()
    process._deadline_s = 0.2
    before = time.monotonic()
    with pytest.raises(ProcessFailed, match=r"the process that adds did not answer within 0\.2 s"):
        process.ask("x" * request_bytes)
    assert time.monotonic() - before < 15
    assert not psutil.pid_exists(process.pid)


def test_another_thread_ends_one_that_is_asked(start):
    process, said = start(READY + "time.sleep(600)"), []
    process.wait_ready()

    def ask() -> None:
        try:
            process.ask(1)
        except ProcessFailed as error:
            said.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.1)
    process.end()
    thread.join(20)
    assert said == [f"the process that adds ended by {signal.SIGKILL.name}"]


def test_no_json_is_no_answer_and_ends_the_process(start):
    process = start(READY + "sys.stdin.readline(); print('no JSON', flush=True); time.sleep(600)")
    process.wait_ready()
    with pytest.raises(ValueError, match="Expecting value"):
        process.ask(1)
    assert not psutil.pid_exists(process.pid)


def test_one_that_cannot_be_started_leaves_no_descriptors():
    given = []

    def refuse(*descriptors: int) -> psutil.Process:
        given.extend(descriptors)
        raise BlockingIOError(11, "no process more")

    files = set(os.listdir("/proc/self/fd"))
    with pytest.raises(BlockingIOError):
        AnsweringProcess(refuse, work="adds", over_limit="", deadline_s=1.0)
    assert len(given) == 2
    assert set(os.listdir("/proc/self/fd")) <= files
