"""What this process does, and when, while steps are recorded (`slimrl train --profile`, `tracking.opentelemetry`).

1. A run whose steps are recorded has a folder with the file PROFILED. Without that file a span costs a comparison.
2. The driver puts the file RECORDING there while it is in a step to record. It names the step's folder below that one,
   in which each process writes a file of its own, a line for each span. Every process looks for RECORDING, engines too,
   which the driver does not call.
3. Times are the system clock's, so that the files of all processes fit together (trace.py).
"""

import heapq
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TextIO

from slimrl.base.atomic import disk_reason

PROFILE_FOLDER = "profile"
"""Name of the profile's folder in a run's folder"""
PROFILED = "profiled"
"""Name of the file that tells the profile of this attempt of a run from that of an earlier one."""
RECORDING = "recording"
"""Name of the file that exists while a step is recorded, and has the name of the step's folder."""
LOOK_S = 0.005
"""Seconds between two looks for the file RECORDING."""
VARIABLE = "SLIMRL_PROFILE"
"""`FOLDER:PROCESS`, in the environment of processes that the run starts by themselves"""

log = logging.getLogger(__name__)

_TRACK: ContextVar[str] = ContextVar("track", default="")


class Spans:
    """Recorder of this process's spans, from `open` on; see SPANS."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self.process = ""
        """Name of the process's role in the run"""
        self._file: TextIO | None = None
        self._opened_as: tuple[Path, int] | None = None
        """Step's folder and pid of the process that opened the file: a forked process writes one of its own"""
        self._looked = float("-inf")
        self._recording: str | None = None
        """Name of the step's folder; None beside recorded steps"""
        self._lanes: dict[str, list[int]] = {}
        """Free numbers of each kind of lane, below the number of lanes that there are"""
        self._num_lanes: dict[str, int] = {}

    def __reduce__(self) -> str:
        """Pickle as the receiving process's own SPANS: Ray pickles an actor's class with the globals that it uses."""
        return "SPANS"

    def open(self, folder: Path, process: str) -> None:
        """Record into `folder` if the run has a profile.

        Args:
            process: what this process is in the run, for example `trainer 0`.
        """
        self._folder, self.process = (folder if _is_profiled(folder) else None), process

    def open_child(self) -> None:
        """Call `open` with what the parent process gave in `child_variables`."""
        if (value := os.environ.get(VARIABLE)) is not None:
            folder, _, process = value.rpartition(":")
            self.open(Path(folder), process)

    @property
    def is_open(self) -> bool:
        """Whether the run has a profile."""
        return self._folder is not None

    def _step(self) -> Path | None:
        """Folder of the step that is recorded now; None beside recorded steps."""
        folder = self._folder  # once: another thread may give the recording up meanwhile
        if folder is None:
            return None
        now = time.monotonic()
        if now - self._looked > LOOK_S:
            self._looked = now
            try:
                self._recording = (folder / RECORDING).read_text()
            except FileNotFoundError:
                self._recording = None
        name = self._recording  # once: another thread may look meanwhile
        return None if name is None else folder / name

    @contextmanager
    def __call__(self, name: str, **details: Any) -> Iterator[None]:
        """Record the block as a span."""
        if self._folder is None:
            yield
            return
        begin_ns = time.time_ns()
        try:
            yield
        finally:
            self.add(name, begin_ns, **details)

    def add(self, name: str, begin_ns: int, **details: Any) -> None:
        """Record what began at a time of `time.time_ns` and ends now."""
        if (step := self._step()) is None:
            return
        span = {
            "name": name,
            "track": _TRACK.get() or _thread(),
            "begin": begin_ns,
            "end": time.time_ns(),
            **({"details": details} if details else {}),
        }
        try:
            if (file := self._opened(step)) is not None:
                file.write(json.dumps(span) + "\n")
        except OSError as error:
            # What is timed goes on. A full disk ends the run where it writes what it needs.
            log.warning("%s records no more spans: %s", self.process, disk_reason(error))
            self._folder = self._file = None

    @contextmanager
    def lane(self, kind: str) -> Iterator[None]:
        """Spans of the block, and of tasks that it starts, are on a track that no other block has at that time.

        Of many coroutines on one thread, whose spans would overlap.
        """
        if self._folder is None:
            yield
            return
        free = self._lanes.setdefault(kind, [])
        if free:
            number = heapq.heappop(free)
        else:
            number = self._num_lanes[kind] = self._num_lanes.get(kind, 0) + 1
        before = _TRACK.set(f"{kind} {number:04d}")
        try:
            yield
        finally:
            _TRACK.reset(before)
            heapq.heappush(free, number)

    def _opened(self, step: Path) -> TextIO | None:
        """The file of this process and step; None if the step has just ended and its folder is gone."""
        pid = os.getpid()
        if self._file is None or self._opened_as != (step, pid):
            try:
                # Whole lines, since most processes of a run are killed at its end.
                self._file = (step / f"{self.process.replace(' ', '_')}-{pid}.jsonl").open("a", buffering=1)
            except FileNotFoundError:
                return None
            self._opened_as = step, pid
            self._file.write(json.dumps({"process": self.process, "pid": pid}) + "\n")
        return self._file


def _thread() -> str:
    """Name of this thread; the one in which Ray calls an actor has none of its own."""
    name = threading.current_thread().name
    return "calls" if name.startswith("Dummy-") else name


def child_variables(folder: Path, process: str) -> dict[str, str]:
    """The environment of a child process that records into `folder`; empty if the run has no profile."""
    return {VARIABLE: f"{folder.absolute()}:{process}"} if _is_profiled(folder) else {}


def _is_profiled(folder: Path) -> bool:
    return (folder / PROFILED).is_file()


SPANS = Spans()
"""Spans of this process. The recorder is global as a logger is: what is timed lies in all layers."""
