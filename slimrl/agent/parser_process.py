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
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import lru_cache, partial
from typing import Any, NoReturn

import psutil

from slimrl.agent.parsers import ParsedTurn, Parser, make_parser
from slimrl.agent.tool_call import MalformedCall, ToolCall
from slimrl.base.answering_process import AnsweringProcess
from slimrl.base.lifeline import end_group_with

CPU_LIMIT_S = 2
"""CPU time of one turn, rounded up to whole seconds; a usual one takes some tenths of a millisecond."""
DEADLINE_S = 60.0
"""Wall clock for an answer: only a process that got stuck, or a machine that is overloaded, reaches it."""
WORK = "parses turns"


class ParserFailed(Exception):
    """The parser raised; the process goes on."""


def start_parser() -> AnsweringProcess:
    """A new process, for `parsed`."""
    over_limit = f"a turn took more than {CPU_LIMIT_S} s of CPU time to parse"
    return AnsweringProcess(_fork, work=WORK, over_limit=over_limit, deadline_s=DEADLINE_S)


def parsed(process: AnsweringProcess, name: str, schemas: str, text: str, tokens: Sequence[str] = ()) -> ParsedTurn:
    """What a parser reads in a turn. Raises ParserFailed, and as AnsweringProcess.ask.

    Args:
        name, schemas, tokens: of the parser, as for `make_parser`, the schemas as JSON.
    """
    answer = process.ask([name, schemas, text, list(tokens)])
    if problem := answer.get("error"):
        raise ParserFailed(problem)
    return ParsedTurn(content=answer["content"], calls=[_call(one) for one in answer["calls"]])


def _fork(questions: int, answers: int) -> psutil.Process:
    driver = os.pidfd_open(os.getpid())
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        with warnings.catch_warnings():
            # Locks that another thread holds stay held in the copy. One that waits for such a lock meets DEADLINE_S.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if not pid:
            _serve_and_exit(questions, answers, driver)
        return psutil.Process(pid)
    finally:
        os.close(driver)


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
        end_group_with(driver)  # its pipe ends a process that waits for a turn, but none that is stuck in one
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        logging.disable()  # whose files are closed
        gc.freeze()  # what it shares stays shared
        _serve(os.fdopen(questions, "rb"), os.fdopen(answers, "wb", buffering=0))
        code = 0
    finally:
        os._exit(code)


def _serve(questions: Any, answers: Any) -> None:
    parser_of = lru_cache(1000)(lambda name, schemas, *tokens: make_parser(name, json.loads(schemas), tokens))
    answers.write(b"true\n")
    for line in questions:
        name, schemas, text, tokens = json.loads(line)
        _, most = resource.getrlimit(resource.RLIMIT_CPU)  # of its user, who may not raise it
        limit = math.ceil(time.process_time()) + CPU_LIMIT_S
        resource.setrlimit(resource.RLIMIT_CPU, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))
        answers.write(_answer(partial(parser_of, name, schemas, *tokens), text).encode() + b"\n")


def _answer(parser: Callable[[], Parser], text: str) -> str:
    try:
        turn = parser().parse(text)
        return json.dumps({"content": turn.content, "calls": [_fields(one) for one in turn.calls]})
    except Exception as error:  # noqa: BLE001 - a parser of the task's own raises anything
        return json.dumps({"error": repr(error)})


def _fields(call: ToolCall | MalformedCall) -> dict[str, Any]:
    """The fields of a call, without those that a subclass in the task's code adds."""
    kind = ToolCall if isinstance(call, ToolCall) else MalformedCall
    return {field.name: getattr(call, field.name) for field in fields(kind)}


def _call(value: dict[str, Any]) -> ToolCall | MalformedCall:
    return ToolCall(**value) if "arguments" in value else MalformedCall(**value)
