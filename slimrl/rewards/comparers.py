"""Processes that compare answers symbolically (comparison.py), outside of the driver's interpreter.

1. The first answers start the processes, at most one per core and eight. Each compares one pair at a time; other
   answers wait.
2. A process that has ended, by its CPU time limit or otherwise, is replaced when the next answer needs it; so is one
   that has grown. The time that an answer waits for its turn and for a start does not count against its deadline.
3. `close_comparers` ends them with the run. They also end with the driver, since their stdin is its pipe.

A multiprocessing pool would import the driver's main module into each process. Its resource tracker would outlive it,
and the end of a run would wait for the tracker.
"""

import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from queue import Empty, LifoQueue

from slimrl.base.waits import is_over, waiting

MAX_COMPARERS = 8
"""Most processes that compare; a comparison takes some hundredths of a second, so more are not needed."""
CPU_LIMIT_S = 5
"""CPU time limit of one comparison."""
DEADLINE_S = 300.0
"""Wall-clock deadline of a process's start and of an answer; only a stuck process reaches it."""
TURN_S = 1800.0
"""How long an answer waits for a process while no other answer gets its result, which takes at most two DEADLINE_S."""
MEMORY_BYTES = 256 * 1024**2
"""Address space that a process may add to what it has when it is ready. A comparison that needs more finds no equality.
"""
KEPT_BYTES = 192 * 1024**2
"""Resident memory, of which a ready process has 80 MiB, with which a process is not kept: sympy remembers results."""
_PROGRAM = Path(__file__).with_name("comparison.py")
"""Started as a file: `-m` would need the package on the path, which a container may not have."""
END_S = 10.0
"""Seconds that a killed process may take to end."""


class OutOfCpuTime(Exception):
    """A comparison exceeded its CPU time limit."""


class ComparerFailed(Exception):
    """A comparison raised, or its process ended or got stuck; whether the answer is right is unknown."""


class Comparers:
    """A pool of at most `max_processes` processes that compare answers, started when needed.

    Args:
        cpu_limit_s: CPU time of one comparison, without the start of the process.
        deadline_s: wall clock, for a start and for an answer.
    """

    def __init__(self, *, max_processes: int, cpu_limit_s: int = CPU_LIMIT_S, deadline_s: float = DEADLINE_S) -> None:
        self._cpu_limit_s, self._deadline_s = cpu_limit_s, deadline_s
        # Last in, first out: a running process is reused before another one is started.
        self._slots: LifoQueue[_Comparer | None] = LifoQueue()
        for _ in range(max_processes):
            self._slots.put(None)
        self._lock = threading.Lock()
        self._started: set[_Comparer] = set()
        self._closed = False
        self._freed_at = time.monotonic()

    def equivalent(self, answer: str, label: str) -> bool:
        """Whether two answers are mathematically the same. May be called from many threads.

        Raises:
            OutOfCpuTime: the comparison exceeded its limit.
            ComparerFailed: the comparison raised, the process ended otherwise or got stuck, `close` was called, or
                the call was cancelled while it waited for its turn.
        """
        with waiting():
            comparer = self._turn()
        try:
            if is_over():
                raise ComparerFailed("nobody waits for this answer any more")
            if comparer is None or not comparer.lives:
                with waiting():
                    comparer = self._start()
                    comparer.wait_ready()
            same = comparer.compare(answer, label)
            if comparer.resident_bytes > KEPT_BYTES:
                comparer.end()
            return same
        finally:
            self._freed_at = time.monotonic()
            self._slots.put(comparer)

    @property
    def pids(self) -> list[int]:
        """Pids of the processes that are alive."""
        with self._lock:
            return [comparer.pid for comparer in self._started if comparer.lives]

    def close(self) -> None:
        """End all processes; waiting and running comparisons raise ComparerFailed."""
        with self._lock:
            self._closed = True
            for comparer in self._started:
                comparer.end()

    def _turn(self) -> "_Comparer | None":
        """A free process, or the place for one. However many answers wait, none is late while others get theirs."""
        began = time.monotonic()
        while (left_s := max(began, self._freed_at) + TURN_S - time.monotonic()) > 0:
            with suppress(Empty):
                return self._slots.get(timeout=left_s)
        raise ComparerFailed(f"no process that compares answers was free within {TURN_S:g} s")

    def _start(self) -> "_Comparer":
        with self._lock:
            if self._closed:
                raise ComparerFailed("the run is ending")
            self._started = {comparer for comparer in self._started if comparer.lives}
            comparer = _Comparer(self._cpu_limit_s, self._deadline_s)
            self._started.add(comparer)
            return comparer


class _Comparer:
    """One process that compares answers, used by one thread at a time."""

    def __init__(self, cpu_limit_s: int, deadline_s: float) -> None:
        # In a new session, so Ctrl-C reaches the driver alone. -P: files next to the program do not shadow modules.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_PROGRAM), str(cpu_limit_s), str(MEMORY_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._questions, self._answers = self._process.stdin, self._process.stdout
        self._cpu_limit_s, self._deadline_s = cpu_limit_s, deadline_s

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    @property
    def resident_bytes(self) -> int:
        """Resident memory of the process; 0 if it has just ended."""
        with suppress(FileNotFoundError, ProcessLookupError):
            return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * resource.getpagesize()
        return 0

    def wait_ready(self) -> None:
        assert self._read() is True, "the first pair is equivalent"

    def compare(self, answer: str, label: str) -> bool:
        try:
            self._questions.write(json.dumps([answer, label]).encode() + b"\n")
            self._questions.flush()
        except BrokenPipeError:
            raise self._cause_of_end() from None
        return self._read()

    def end(self) -> None:
        self._process.kill()
        self._process.wait(END_S)

    def _read(self) -> bool:
        poll = select.poll()
        poll.register(self._answers, select.POLLIN)
        if not poll.poll(1000 * self._deadline_s):
            self.end()
            raise ComparerFailed(f"the process that compares answers did not respond within {self._deadline_s:g} s")
        line = self._answers.readline()
        if not line:
            raise self._cause_of_end()
        same = json.loads(line)
        if not isinstance(same, bool):
            raise ComparerFailed(f"the comparison failed: {same}")
        return same

    def _cause_of_end(self) -> Exception:
        code = self._process.wait(END_S)
        self._answers.close()
        with suppress(BrokenPipeError):
            self._questions.close()
        if code == -signal.SIGXCPU:
            return OutOfCpuTime(f"the comparison took more than {self._cpu_limit_s} s of CPU time")
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        return ComparerFailed(f"the process that compares answers ended {how}")


_shared: Comparers | None = None
_shared_lock = threading.Lock()


def shared_comparers() -> Comparers:
    """The comparers of this process, global because a reward function gets no other arguments."""
    global _shared
    with _shared_lock:
        if _shared is None:
            _shared = Comparers(max_processes=min(MAX_COMPARERS, len(os.sched_getaffinity(0))))
        return _shared


def close_comparers() -> None:
    """End the processes of `shared_comparers`, which starts new ones if it is called again."""
    global _shared
    with _shared_lock:
        comparers, _shared = _shared, None
    if comparers is not None:
        comparers.close()
