"""A process that parses turns, so that a parse can be ended: regular expressions can neither be in a thread.

It is forked, because the parsers' imports take seconds and 600 MB, which the copy shares. Of the copied process it uses
its modules alone. The kernel ends it when one turn takes CPU_LIMIT_S of CPU time. It also ends with the process that
forked it.
"""

import gc
import json
import logging
import math
import os
import resource
import select
import signal
import struct
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import fields
from functools import lru_cache
from typing import Any, NoReturn

from slimrl.agent.parsers import MalformedCall, ParsedTurn, Parser, ToolCall, make_parser

CPU_LIMIT_S = 2
"""CPU time of one turn, rounded up to whole seconds; a usual one takes some tenths of a millisecond."""
DEADLINE_S = 60.0
"""Wall clock for an answer: only a process that got stuck, or a machine that is overloaded, reaches it."""
END_S = 10.0
"""Seconds that a killed process may take to end"""
_LENGTH = struct.Struct("!Q")


class OutOfCpuTime(Exception):
    """A turn took more than CPU_LIMIT_S."""


class ParserFailed(Exception):
    """The process ended otherwise, or got stuck."""


class ParserRaised(ParserFailed):
    """The parser raised; the process goes on."""


class ParserProcess:
    """One process that parses turns, used by one thread at a time."""

    def __init__(self) -> None:
        questions, self._questions = os.pipe()
        self._answers, answers = os.pipe()
        driver = os.pidfd_open(os.getpid())
        os.set_blocking(self._questions, False)
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            # Locks that another thread holds stay held in the copy. One that waits for such a lock meets DEADLINE_S.
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                self.pid = os.fork()
            except OSError:
                for descriptor in (questions, self._questions, self._answers, answers, driver):
                    os.close(descriptor)
                raise
        self._lives = True
        if not self.pid:
            _serve_and_exit(questions, answers, driver)
        for descriptor in (questions, answers, driver):
            os.close(descriptor)

    def parse(self, name: str, schemas: str, text: str) -> ParsedTurn:
        """What a parser reads in a turn. After an exception other than ParserRaised the process has ended, or must.

        Args:
            name, schemas: of the parser, as for `make_parser`, the schemas as JSON.

        Raises:
            OutOfCpuTime: the turn took too long.
            ParserFailed: see there, and ParserRaised.
        """
        deadline = time.monotonic() + DEADLINE_S
        try:
            self._write(_framed(json.dumps([name, schemas, text]).encode()), deadline)
            answer = json.loads(self._read(deadline))
        except (BrokenPipeError, EOFError):
            raise self._cause_of_end() from None
        if problem := answer.get("error"):
            raise ParserRaised(problem)
        return ParsedTurn(content=answer["content"], calls=[_call(one) for one in answer["calls"]])

    def end(self) -> None:
        """Kill it and close its pipes, unless it has ended."""
        if self._lives:
            os.kill(self.pid, signal.SIGKILL)
            self._reap()

    def _reap(self) -> int:
        self._lives = False
        os.close(self._questions)
        os.close(self._answers)
        deadline = time.monotonic() + END_S
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.002)
        raise ParserFailed(f"the process {self.pid} that parses turns did not end within {END_S:g} s")

    def _cause_of_end(self) -> Exception:
        code = self._reap()
        if code == -signal.SIGXCPU:
            return OutOfCpuTime(f"a turn took more than {CPU_LIMIT_S} s of CPU time to parse")
        return ParserFailed(f"the process that parses turns ended with code {code}")

    def _write(self, content: bytes, deadline: float) -> None:
        left = memoryview(content)
        while left:
            self._wait(self._questions, select.POLLOUT, deadline)
            left = left[os.write(self._questions, left[: select.PIPE_BUF]) :]

    def _read(self, deadline: float) -> bytes:
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size, deadline))
        return self._exactly(length, deadline)

    def _exactly(self, length: int, deadline: float) -> bytes:
        content = bytearray()
        while len(content) < length:
            self._wait(self._answers, select.POLLIN, deadline)
            part = os.read(self._answers, length - len(content))
            if not part:
                raise EOFError
            content += part
        return bytes(content)

    def _wait(self, descriptor: int, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(descriptor, event)
        if not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
            self.end()
            raise ParserFailed(f"the process that parses turns did not answer within {DEADLINE_S:g} s")


def _framed(content: bytes) -> bytes:
    return _LENGTH.pack(len(content)) + content


def _serve_and_exit(questions: int, answers: int, driver: int) -> NoReturn:
    """What the forked process runs: it answers requests until its pipe ends, then exits."""
    code = 1
    try:
        os.setsid()  # so that Ctrl-C reaches the driver alone
        for number in range(1, signal.NSIG):
            if signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN, None):
                signal.signal(number, signal.SIG_DFL)
        first = 3
        for kept in sorted((questions, answers, driver)):
            os.closerange(first, kept)
            first = kept + 1
        os.closerange(first, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        threading.Thread(target=_end_with, args=(driver,), daemon=True).start()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        logging.disable()  # whose files are closed
        gc.freeze()  # what it shares stays shared
        _serve(os.fdopen(questions, "rb"), os.fdopen(answers, "wb", buffering=0))
        code = 0
    finally:
        os._exit(code)


def _end_with(driver: int) -> None:
    """The pipe ends a process that waits for a turn; this ends one that is stuck in one, too."""
    poll = select.poll()
    poll.register(driver, select.POLLIN)
    poll.poll()
    os._exit(1)


def _serve(questions: Any, answers: Any) -> None:
    parser_of = lru_cache(1000)(lambda name, schemas: make_parser(name, json.loads(schemas)))
    while head := questions.read(_LENGTH.size):
        name, schemas, text = json.loads(questions.read(*_LENGTH.unpack(head)))
        _, most = resource.getrlimit(resource.RLIMIT_CPU)  # of its user, who may not raise it
        limit = math.ceil(time.process_time()) + CPU_LIMIT_S
        resource.setrlimit(resource.RLIMIT_CPU, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))
        answers.write(_framed(_answer(parser_of, name, schemas, text)))


def _answer(parser_of: Callable[[str, str], Parser], name: str, schemas: str, text: str) -> bytes:
    try:
        turn = parser_of(name, schemas).parse(text)
        calls = [_fields(one) for one in turn.calls]
        return json.dumps({"content": turn.content, "calls": calls}).encode()
    except Exception as error:  # noqa: BLE001 - a parser of the task's own raises anything
        return json.dumps({"error": repr(error)}).encode()


def _fields(call: ToolCall | MalformedCall) -> dict[str, Any]:
    """The fields of a call, without those that a subclass in the task's code adds."""
    kind = ToolCall if isinstance(call, ToolCall) else MalformedCall
    return {field.name: getattr(call, field.name) for field in fields(kind)}


def _call(value: dict[str, Any]) -> ToolCall | MalformedCall:
    return ToolCall(**value) if "arguments" in value else MalformedCall(**value)
