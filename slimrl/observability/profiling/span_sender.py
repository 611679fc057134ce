"""Sends the spans of recorded steps to an OTLP endpoint, in a process of its own (`tracking.opentelemetry`).

1. The driver names each step that has ended, a line through a pipe, and goes on.
2. The process reads the step's files, sends their spans as one trace (otlp.py) and writes a line of JSON to its report:
   the step, how many spans were sent, how many were dropped, and why.
3. A step is tried once. Of steps that wait longer than others take, the oldest beyond MOST_WAITING are dropped.
4. At the run's end the driver waits CLOSE_S, and then ends the process.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

CLOSE_S = 10.0
"""Seconds that the end of a run waits for spans that are not sent yet."""
MOST_WAITING = 8
"""Steps that may wait to be sent."""


class SpanSender:
    """The driver's side."""

    def __init__(self, url: str, run: str, report: Path, say: Callable[[str], None]) -> None:
        """
        Args:
            url: base URL of the endpoint, to which `/v1/traces` is added.
            run: name of the run.
            report: file for the process's report; a resumed run adds to it.
            say: shows the user a line.
        """
        self._url, self._report, self._say = url, report, say
        self._num_given, self._num_told, self._num_dropped = 0, 0, 0
        report.parent.mkdir(parents=True, exist_ok=True)
        report.touch()
        self._read_bytes = report.stat().st_size
        main = [sys.executable, "-m", "slimrl.observability.profiling.otlp"]
        with report.with_suffix(".log").open("wb") as log:
            # In a session of its own, which Ctrl-C in a terminal does not reach.
            self._process = subprocess.Popen(
                [*main, str(os.getpid()), url, run, str(report)],
                start_new_session=True,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )
        assert self._process.stdin is not None
        self._steps = self._process.stdin
        os.set_blocking(self._steps.fileno(), False)

    def send(self, folder: Path, *, keep: bool) -> None:
        """Have a step's spans sent, whose folder is removed then unless it is kept."""
        self._num_given += 1
        line = json.dumps({"folder": str(folder), "keep": keep}).encode() + b"\n"
        # Where its process has ended or reads no more, `close` counts the step.
        with suppress(BrokenPipeError, BlockingIOError):
            os.write(self._steps.fileno(), line)
        self._look()

    def close(self) -> None:
        """Wait for what is not sent yet, at most CLOSE_S, and end the process."""
        self._steps.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._look()
        lost = [f"{self._num_dropped} spans"] if self._num_dropped else []
        if untold := self._num_given - self._num_told:
            lost.append(f"the spans of {untold} steps")
        if lost:
            self._say(f"OpenTelemetry: {' and '.join(lost)} were not sent to {self._url} ({self._report})")

    def _look(self) -> None:
        """Read what is new in the report, and say the first time that spans were dropped."""
        with self._report.open("rb") as file:
            file.seek(self._read_bytes)
            new = file.read()
        lines = new.split(b"\n")[:-1]
        self._read_bytes += sum(len(line) + 1 for line in lines)
        for told in map(json.loads, lines):
            self._num_told += 1
            if told["dropped"] and not self._num_dropped:
                self._say(
                    f"OpenTelemetry: {self._url} does not take the spans of {told['step']}: {told['error']}. "
                    "The run goes on, and each further step is tried."
                )
            self._num_dropped += told["dropped"]
