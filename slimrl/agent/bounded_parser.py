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
from queue import Empty, LifoQueue
from typing import Any

from slimrl.agent.parser_process import DEADLINE_S, OutOfCpuTime, ParserFailed, ParserProcess, ParserRaised
from slimrl.agent.parsers import MalformedCall, NoCalls, ParsedTurn, make_parser
from slimrl.base.threads import ReusedThreads

log = logging.getLogger(__name__)
NUM_PROCESSES = min(8, max(2, len(os.sched_getaffinity(0)) // 4))
"""The most processes of one interpreter; one parses a thousand turns a second, or holds up others by its CPU time for
a turn."""
NOT_IN_TIME = "malformed tool call: it takes too long to read"


class BoundedParser:
    """
    Args:
        name, schemas: see `make_parser`, which also says what it raises.
    """

    def __init__(self, name: str, schemas: Sequence[dict[str, Any]]) -> None:
        self._name, self._schemas = name, json.dumps(list(schemas))
        self._parser = make_parser(name, schemas)
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
            ParserFailed: the parser raised, its process ended, or no process was free in time.
        """
        if isinstance(self._parser, NoCalls) or self._cannot_call(text):
            return ParsedTurn(content=text.strip(), calls=[])
        given_up = threading.Event()
        try:
            parsed: ParsedTurn = await _threads.run(lambda: _processes.parse(self._name, self._schemas, text, given_up))
        finally:
            given_up.set()
        return parsed


class _Processes:
    """The pool of parser processes, forked when needed; may be used from many threads."""

    def __init__(self) -> None:
        # Last in, first out: a process that runs is used before another one is forked.
        self._slots: LifoQueue[ParserProcess | None] = LifoQueue()
        for _ in range(NUM_PROCESSES):
            self._slots.put(None)
        self._forking = threading.Lock()
        self._slow: set[str] = set()
        """Names of the parsers of which a turn took too long"""

    def parse(self, name: str, schemas: str, text: str, given_up: threading.Event) -> ParsedTurn:
        """See `BoundedParser.read`. A turn that is given up before a process is free for it is not parsed."""
        try:
            process = self._slots.get(timeout=DEADLINE_S)
        except Empty:
            raise ParserFailed(f"no process that parses turns was free within {DEADLINE_S:g} s") from None
        kept = None
        try:
            if given_up.is_set():
                kept = process
                raise ParserFailed("nobody waits for this turn any more")
            if process is None:
                with self._forking:
                    process = ParserProcess()
            parsed = process.parse(name, schemas, text)
            kept = process
        except ParserRaised:
            kept = process
            raise
        except OutOfCpuTime as error:
            if name not in self._slow:
                self._slow.add(name)
                log.warning("parser %s: %s, which makes the turn a malformed call; said once", name, error)
            return ParsedTurn(content=text.strip(), calls=[MalformedCall(problem=NOT_IN_TIME)])
        finally:
            try:
                if process is not None and kept is None:
                    process.end()
            finally:
                self._slots.put(kept)
        return parsed

    def close(self) -> None:
        """End the processes that parse nothing; the others end with their parse and this process's pipe."""
        taken: list[ParserProcess | None] = []
        with suppress(Empty):
            while True:
                taken.append(self._slots.get_nowait())
        for process in taken:
            try:
                if process is not None:
                    process.end()
            finally:
                self._slots.put(None)


_threads = ReusedThreads()
_processes = _Processes()


def close_parsers() -> None:
    """End the processes; the next parse forks new ones."""
    _processes.close()
