"""A parser whose every parse ends: in a process with a limit of CPU time.

What a policy writes may send a regular expression into exponential time, and so may the schemas of an agent's tools. A
text without any marker of a call is not sent there.
"""

import json
import logging
import os
import threading
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import Any

from slimrl.agent.parser_process import DEADLINE_S, WORK, parsed, start_parser
from slimrl.agent.parsers import NoCalls, ParsedTurn, make_parser
from slimrl.agent.tool_call import MalformedCall
from slimrl.base.answering_process import OutOfCpuTime
from slimrl.base.process_pool import ProcessPool
from slimrl.base.threads import ReusedThreads

log = logging.getLogger(__name__)
NUM_PROCESSES = min(8, max(2, len(os.sched_getaffinity(0)) // 4))
"""The most processes of one interpreter; one parses a thousand turns a second, or holds up others by its CPU time for
a turn."""
NOT_IN_TIME = "malformed tool call: it takes too long to read"


class BoundedParser:
    """
    Args:
        name, schemas, tokens: see `make_parser`, which also says what it raises.
    """

    def __init__(self, name: str, schemas: Sequence[dict[str, Any]], tokens: Sequence[str] = ()) -> None:
        self._name, self._schemas, self._tokens = name, json.dumps(list(schemas)), tokens
        self._parser = make_parser(name, schemas, tokens)
        self.close_marker = self._parser.close_marker
        if not isinstance(self._parser, NoCalls):
            # Some of SGLang's import other packages, transformers among them, when they first parse, and a task's own
            # may. In the process this would take its CPU time. What a task's own raises here, it raises in turns.
            with suppress(Exception) if ":" in name else nullcontext():
                self._parser.parse("".join(getattr(self._parser, "all_markers", ())) or "words")

    def parse(self, text: str) -> ParsedTurn:
        """The calls in a text of our own, parsed without a time limit."""
        return self._parser.parse(text)

    def _cannot_call(self, text: str) -> bool:
        markers = getattr(self._parser, "all_markers", ())
        return bool(markers) and not any(marker in text for marker in markers)

    async def read(self, text: str) -> ParsedTurn:
        """What the parser reads in a policy's turn; a malformed call if it takes too long.

        Raises:
            ParserFailed: the parser raised.
            ProcessFailed: its process ended, or no process was free in time.
        """
        if isinstance(self._parser, NoCalls) or self._cannot_call(text):
            return ParsedTurn(content=text.strip(), calls=[])
        given_up = threading.Event()
        try:
            turn: ParsedTurn = await _threads.run(lambda: self._parsed(text, given_up))
        finally:
            given_up.set()
        return turn

    def _parsed(self, text: str, given_up: threading.Event) -> ParsedTurn:
        """A turn that is given up before a process is free for it is not parsed."""
        try:
            with _processes.process(given_up.is_set) as process:
                return parsed(process, self._name, self._schemas, text, self._tokens)
        except OutOfCpuTime as error:
            if self._name not in _slow:
                _slow.add(self._name)
                log.warning("parser %s: %s, which makes the turn a malformed call; said once", self._name, error)
            return ParsedTurn(content=text.strip(), calls=[MalformedCall(problem=NOT_IN_TIME)])


def _pool() -> ProcessPool:
    return ProcessPool(start_parser, work=WORK, num_processes=NUM_PROCESSES, turn_s=DEADLINE_S)


_threads = ReusedThreads()
_processes = _pool()
_slow: set[str] = set()
"""Names of the parsers of which a turn took too long"""


def close_parsers() -> None:
    """End the processes; the next parse forks new ones."""
    global _processes
    processes, _processes = _processes, _pool()
    processes.close()
