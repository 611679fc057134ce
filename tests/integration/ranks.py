"""Runs one function on N ranks, each a process of its own, and brings back what each returned.

Ranks are forked from a server process that has imported the trainer already, which saves seconds per rank. Where CUDA
is there they are spawned: that import asks for GPUs, and CUDA does not work in a process forked after that. Each rank
is ended by its pid, and none outlives `run_ranks`.
"""

import contextlib
import multiprocessing
import queue
import time
import traceback
from collections.abc import Callable, Collection
from typing import Any

from slimrl import device
from slimrl.engines.servers.ports import free_port


def run_ranks(
    body: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float = 120.0, dying: Collection[int] = ()
) -> list[Any]:
    """`body(rank, num_ranks, port, *args)` on every rank; results by rank.

    Args:
        body: a module-level function; its result must be picklable.
        timeout_s: deadline of the whole run.
        dying: ranks that are meant to end without a result; theirs is None.

    Raises:
        RuntimeError: a rank raised, with its traceback, or died.
        TimeoutError: the deadline passed.
    """
    context: Any = multiprocessing.get_context(start_method())
    if start_method() == "forkserver":
        context.set_forkserver_preload(["slimrl.trainer.checkpointing.checkpoint", "slimrl.trainer.micro_batch_runner"])
    results: Any = context.Queue()
    port = free_port()
    processes = [
        context.Process(target=_rank, args=(body, rank, num_ranks, port, args, results)) for rank in range(num_ranks)
    ]
    try:
        for process in processes:
            process.start()
        values = _collect(processes, results, time.monotonic() + timeout_s, dying)
        for process in processes:
            process.join(10)
        return values
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join(10)


def start_method() -> str:
    """How the ranks' processes are started."""
    return "spawn" if device.device_type() == "cuda" else "forkserver"


def _collect(processes: list[Any], results: Any, deadline: float, dying: Collection[int]) -> list[Any]:
    answers: dict[int, Any] = dict.fromkeys(dying)
    while len(answers) < len(processes):
        if time.monotonic() > deadline:
            raise TimeoutError(f"ranks {sorted(set(range(len(processes))) - set(answers))} did not finish")
        try:
            rank, error, value = results.get(timeout=0.2)
        except queue.Empty:
            dead = [rank for rank, p in enumerate(processes) if rank not in answers and p.exitcode not in (None, 0)]
            if dead:
                raise RuntimeError(f"ranks {dead} died") from None
            continue
        if error is not None:
            raise RuntimeError(_report(rank, error, results))
        answers[rank] = value
    return [answers[rank] for rank in range(len(processes))]


def _report(rank: int, error: str, results: Any) -> str:
    """This rank's traceback and those of the ranks that failed within a second of it: one of them is the cause."""
    failures = [f"rank {rank} raised:\n{error}"]
    with contextlib.suppress(queue.Empty):
        while True:
            rank, error, _ = results.get(timeout=1)
            failures.append(f"rank {rank} raised:\n{error}")
    return "\n".join(failures)


def _rank(body: Callable[..., Any], rank: int, num_ranks: int, port: int, args: tuple[Any, ...], results: Any) -> None:
    try:
        results.put((rank, None, body(rank, num_ranks, port, *args)))
    except BaseException:
        results.put((rank, traceback.format_exc(), None))
        raise
