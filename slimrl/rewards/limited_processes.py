"""Processes that answer requests about the policy's texts (limited_program.py), outside of the driver's interpreter.

There are at most one per core and eight (base/process_pool.py). One that has grown is replaced. They end with the
driver at the latest, since their stdin is its pipe.
"""

import os
import sys
from pathlib import Path
from typing import Any

import psutil

from slimrl.base.answering_process import AnsweringProcess
from slimrl.base.process_pool import ProcessPool

MAX_PROCESSES = 8
"""Most processes of a kind; a request takes some hundredths of a second, so more are not needed."""
CPU_LIMIT_S = 5
"""CPU time limit of one request."""
DEADLINE_S = 300.0
"""Wall-clock deadline of a process's start and of an answer; only a stuck process reaches it."""
TURN_S = 1800.0
"""How long a request waits for a process while no other request gets its answer, which takes at most two DEADLINE_S."""
MEMORY_BYTES = 256 * 1024**2
"""Address space that a process may add to what it has when it is ready."""
KEPT_BYTES = 192 * 1024**2
"""Resident memory with which a process is not kept: sympy remembers results. A ready process has about 80 MiB."""
_PROGRAM = Path(__file__).with_name("limited_program.py")
"""Started as a file: `-m` would need the package on the path, which a container may not have."""


def one_per_core() -> int:
    return min(MAX_PROCESSES, len(os.sched_getaffinity(0)))


class LimitedProcesses(ProcessPool):
    """
    Args:
        file: has the function `answer` that the processes run, see limited_program.py.
        work: what they do, for messages, such as "compares answers".
        request: what a request is called in messages, such as "comparison".
        cpu_limit_s: CPU time of one request, without the start of the process.
        deadline_s: wall clock, for a start and for an answer.
    """

    def __init__(
        self,
        file: Path,
        *,
        work: str,
        request: str,
        max_processes: int,
        cpu_limit_s: int = CPU_LIMIT_S,
        deadline_s: float = DEADLINE_S,
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        # -P: files next to the program do not shadow modules.
        command = [sys.executable, "-P", str(_PROGRAM), str(file), str(cpu_limit_s), str(MEMORY_BYTES)]
        self._kept_bytes = kept_bytes

        def start() -> AnsweringProcess:
            return AnsweringProcess(
                lambda stdin, stdout: psutil.Popen(command, stdin=stdin, stdout=stdout, start_new_session=True),
                work=work,
                over_limit=f"the {request} took more than {cpu_limit_s} s of CPU time",
                deadline_s=deadline_s,
            )

        super().__init__(start, work=work, num_processes=max_processes, turn_s=TURN_S)

    def ask(self, request: Any) -> Any:
        """The answer to a request; both can be JSON. May be called from many threads.

        Raises:
            OutOfCpuTime: the request exceeded its limit.
            ProcessFailed: the process ended otherwise or got stuck, `close` was called, or the call was cancelled
                while it waited for its turn.
        """
        with self.process() as process:
            answer = process.ask(request)
            if process.resident_bytes > self._kept_bytes:
                process.end()
        return answer
