"""Processes that compare answers symbolically (comparison.py), outside of the driver's interpreter.

There are at most one per core and eight (base/process_pool.py). One that has grown is replaced. `close_comparers` ends
them with the run; they also end with the driver, since their stdin is its pipe.
"""

import os
import sys
import threading
from pathlib import Path

import psutil

from slimrl.base.answering_process import AnsweringProcess, ProcessFailed
from slimrl.base.process_pool import ProcessPool

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
_WORK = "compares answers"


class Comparers(ProcessPool):
    """
    Args:
        cpu_limit_s: CPU time of one comparison, without the start of the process.
        deadline_s: wall clock, for a start and for an answer.
    """

    def __init__(self, *, max_processes: int, cpu_limit_s: int = CPU_LIMIT_S, deadline_s: float = DEADLINE_S) -> None:
        # -P: files next to the program do not shadow modules.
        command = [sys.executable, "-P", str(_PROGRAM), str(cpu_limit_s), str(MEMORY_BYTES)]

        def start() -> AnsweringProcess:
            return AnsweringProcess(
                lambda stdin, stdout: psutil.Popen(command, stdin=stdin, stdout=stdout, start_new_session=True),
                work=_WORK,
                over_limit=f"the comparison took more than {cpu_limit_s} s of CPU time",
                deadline_s=deadline_s,
            )

        super().__init__(start, work=_WORK, num_processes=max_processes, turn_s=TURN_S)

    def equivalent(self, answer: str, label: str) -> bool:
        """Whether two answers are mathematically the same. May be called from many threads.

        Raises:
            OutOfCpuTime: the comparison exceeded its limit.
            ProcessFailed: the comparison raised, the process ended otherwise or got stuck, `close` was called, or
                the call was cancelled while it waited for its turn.
        """
        with self.process() as process:
            same = process.ask([answer, label])
            if process.resident_bytes > KEPT_BYTES:
                process.end()
        if not isinstance(same, bool):
            raise ProcessFailed(f"the comparison failed: {same}")
        return same


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
