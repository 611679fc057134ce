"""Processes that compare answers symbolically (comparison.py). `close_comparers` ends them with the run."""

import threading
from pathlib import Path

from slimrl.base.answering_process import ProcessFailed
from slimrl.rewards.limited_processes import CPU_LIMIT_S, DEADLINE_S, LimitedProcesses, one_per_core


class Comparers(LimitedProcesses):
    """
    Args:
        cpu_limit_s: CPU time of one comparison, without the start of the process.
        deadline_s: wall clock, for a start and for an answer.
    """

    def __init__(self, *, max_processes: int, cpu_limit_s: int = CPU_LIMIT_S, deadline_s: float = DEADLINE_S) -> None:
        super().__init__(
            Path(__file__).with_name("comparison.py"),
            work="compares answers",
            request="comparison",
            max_processes=max_processes,
            cpu_limit_s=cpu_limit_s,
            deadline_s=deadline_s,
        )

    def equivalent(self, answer: str, label: str) -> bool:
        """Whether two answers are mathematically the same. May be called from many threads.

        Raises:
            OutOfCpuTime: the comparison exceeded its limit.
            ProcessFailed: the comparison raised, or as `ask`.
        """
        same = self.ask([answer, label])
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
            _shared = Comparers(max_processes=one_per_core())
        return _shared


def close_comparers() -> None:
    """End the processes of `shared_comparers`, which starts new ones if it is called again."""
    global _shared
    with _shared_lock:
        comparers, _shared = _shared, None
    if comparers is not None:
        comparers.close()
