"""What worker processes tell and how they end, with the two ends of a pipe in this one."""

import signal
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest
import torch
from slimrl_tools.convert import workers
from slimrl_tools.convert.workers import REPORT_BYTES


@pytest.fixture
def told(monkeypatch):
    """Runs a worker's part and gives its messages."""
    monkeypatch.setattr(workers, "_end_with_parent", lambda: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)

    def run(work, part):
        receiver, sender = Pipe(duplex=False)
        workers._work(work, part, sender)
        sender.close()
        messages = []
        while receiver.poll():
            try:
                messages.append(receiver.recv())
            except EOFError:
                break
        return messages

    return run


def test_a_worker_reports_its_bytes_now_and_then_and_all_of_them_at_the_end(told):
    def work(part, advance):
        for nbytes in part:
            advance(nbytes)

    part = [REPORT_BYTES - 1, 1, REPORT_BYTES, 5, 6]
    assert told(work, part) == [REPORT_BYTES, REPORT_BYTES, 11, None]


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (ValueError("broken"), ValueError, "broken"),
        (OSError(28, "no space"), OSError, "[Errno 28] no space"),
        (KeyError("a bug"), RuntimeError, "a worker process failed:\nTraceback"),
    ],
)
def test_what_a_worker_raises_comes_back_as_what_it_is(told, error, kind, says):
    def work(part, advance):
        advance(3)
        raise error

    (bytes_done, last) = told(work, None)
    assert bytes_done == 3
    assert type(last) is kind
    assert str(last).startswith(says)
    receiver, sender = Pipe(duplex=False)
    sender.send(last)
    with pytest.raises(kind) as raised:
        workers._listen({receiver: None}, lambda _: None)
    assert str(raised.value).startswith(says)


def test_all_workers_are_listened_to_until_each_is_done():
    pipes, done = [Pipe(duplex=False) for _ in range(2)], []
    for number, (_, sender) in enumerate(pipes):
        sender.send(number + 1)
        sender.send(None)
        sender.close()
    workers._listen({receiver: None for receiver, _ in pipes}, done.append)
    assert sorted(done) == [1, 2]


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (-signal.SIGKILL, "was ended by SIGKILL; the memory may have run out"),
        (-signal.SIGTERM, "was ended by SIGTERM$"),
        (0, "ended with code 0 before it was done"),
        (3, "ended with code 3 before it was done"),
        (None, "ended with code None before it was done"),
    ],
)
def test_a_worker_that_ends_without_a_word_is_an_error_that_says_how(code, says):
    receiver, sender = Pipe(duplex=False)
    sender.send(1)
    sender.close()
    worker = SimpleNamespace(exitcode=code, join=lambda timeout: None)
    with pytest.raises(ChildProcessError, match=f"a worker process {says}"):
        workers._listen({receiver: worker}, lambda _: None)


def test_workers_are_told_to_end_and_those_that_do_not_are_killed():
    events = []

    class Worker:
        def __init__(self, name, *, obeys):
            self.name, self._lives, self._obeys = name, True, obeys

        def terminate(self):
            events.append(("terminate", self.name))
            self._lives = not self._obeys

        def join(self, timeout):
            events.append(("join", self.name))

        def is_alive(self):
            return self._lives

        def kill(self):
            events.append(("kill", self.name))

    workers._end([Worker("a", obeys=True), Worker("b", obeys=False)])
    assert events == [
        ("terminate", "a"), ("terminate", "b"), ("join", "a"), ("join", "b"), ("kill", "b"), ("join", "b"),
    ]  # fmt: skip


def test_interrupts_wait_until_all_workers_are_started():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with workers._interrupts_held():
        assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
