"""A child process that answers requests, one after the other, each a line of JSON.

It gets the requests through one pipe and answers through another, first `true` when it is ready. It ends with the pipe
of the requests, and so with its parent; one that may be stuck then needs a further way to end with it.
"""

import json
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import psutil

from slimrl.base.processes import END_S

_READ_BYTES = 65536


class OutOfCpuTime(Exception):
    """The kernel ended the process at its limit of CPU time."""


class ProcessFailed(Exception):
    """The process ended otherwise, or was stuck and killed, or there was none."""


class AnsweringProcess:
    """
    Args:
        start: starts the process with its ends of the pipes of requests and of answers, in a session of its own, so
            that Ctrl-C reaches this process alone. May raise OSError.
        work: what it does, for messages, such as "compares answers".
        over_limit: what is said of a request at which it was ended by its limit of CPU time.
        deadline_s: wall clock for an answer, and for the process to become ready.
    """

    def __init__(
        self, start: Callable[[int, int], psutil.Process], *, work: str, over_limit: str, deadline_s: float
    ) -> None:
        self._work, self._over_limit, self._deadline_s = work, over_limit, deadline_s
        self._reaping = threading.Lock()
        their_requests, requests = os.pipe()
        answers, their_answers = os.pipe()
        os.set_blocking(requests, False)
        with ExitStack() as unless_started:
            self._requests = unless_started.enter_context(open(requests, "wb", buffering=0))
            self._answers = unless_started.enter_context(open(answers, "rb", buffering=0))
            try:
                self._process = start(their_requests, their_answers)
            finally:
                os.close(their_requests)
                os.close(their_answers)
            unless_started.pop_all()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def lives(self) -> bool:
        return self._exit_code(0) is None

    @property
    def resident_bytes(self) -> int:
        """Its resident memory; 0 if it has just ended."""
        num_bytes: int = self._process.memory_info().rss if self.lives else 0
        return num_bytes

    def wait_ready(self) -> None:
        """Raises as `ask`."""
        ready = self._exchange(b"")
        assert ready is True, ready

    def ask(self, request: Any) -> Any:
        """The answer to a request; both can be JSON. Used by one thread at a time.

        Raises:
            OutOfCpuTime: the request took too long.
            ProcessFailed: the process ended, or did not answer in time.
        """
        return self._exchange(json.dumps(request).encode() + b"\n")

    def end(self) -> None:
        """Kill the process, if it lives, and wait until it has ended. May be called by another thread than `ask`."""
        with suppress(psutil.NoSuchProcess):
            self._process.kill()
        if self._exit_code(END_S) is None:
            raise ProcessFailed(f"the process {self.pid} that {self._work} did not end within {END_S:g} s")

    def _exit_code(self, timeout_s: float) -> int | None:
        """None if it lives still. Of two threads that reap it only one would be told the code; 0 if others have."""
        with self._reaping, suppress(psutil.TimeoutExpired):
            return int(self._process.wait(timeout_s) or 0)
        return None

    def _exchange(self, request: bytes) -> Any:
        """Send a line, or nothing, and read one. The process has ended after any exception."""
        deadline = time.monotonic() + self._deadline_s
        with ExitStack() as on_failure:
            on_failure.enter_context(self._requests)
            on_failure.enter_context(self._answers)
            on_failure.callback(self.end)
            try:
                self._send(request, deadline)
                answer = json.loads(self._line(deadline))
            except (BrokenPipeError, EOFError):
                raise self._failure() from None
            on_failure.pop_all()
        return answer

    def _failure(self) -> Exception:
        code = self._exit_code(END_S)
        if code == -signal.SIGXCPU:
            return OutOfCpuTime(self._over_limit)
        how = f"by {signal.Signals(-code).name}" if code is not None and code < 0 else f"with code {code}"
        return ProcessFailed(f"the process that {self._work} ended {how}")

    def _send(self, request: bytes, deadline: float) -> None:
        left = memoryview(request)
        while left:
            self._wait(self._requests.fileno(), select.POLLOUT, deadline)
            left = left[self._requests.write(left) or 0 :]

    def _line(self, deadline: float) -> bytes:
        line = bytearray()
        while not line.endswith(b"\n"):
            self._wait(self._answers.fileno(), select.POLLIN, deadline)
            if not (part := self._answers.read(_READ_BYTES)):
                raise EOFError
            line += part
        return bytes(line)

    def _wait(self, descriptor: int, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(descriptor, event)
        if not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
            raise ProcessFailed(f"the process that {self._work} did not answer within {self._deadline_s:g} s")
