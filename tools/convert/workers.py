"""Worker processes, each with its part of the files; they send back progress and errors."""

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

from slimrl_tools.progress import Advance

REPORT_BYTES = 16 * 1024**2
"""Progress after which a worker reports it."""

END_S = 10.0
"""Deadline for a worker to end after SIGTERM, and after SIGKILL."""


def divide(sizes: Mapping[str, int], workers: int) -> list[list[str]]:
    """Names in at most `workers` parts of about equal sizes, none empty; each keeps the order."""
    parts: list[list[str]] = [[] for _ in range(min(workers, max(1, len(sizes))))]
    filled = [0] * len(parts)
    for name, size in sizes.items():
        least = min(range(len(parts)), key=lambda number: filled[number])
        parts[least].append(name)
        filled[least] += size
    return parts


def run_workers[Part](work: Callable[[Part, Advance], None], parts: Sequence[Part], advance: Advance) -> None:
    """Call `work` on every part, each in a process of its own; a single part in this one.

    The first failure ends the others. There is no deadline while all workers live.

    Args:
        work: can be pickled; called with its part and the function to which it reports bytes that are done.

    Raises:
        ValueError: and OSError: with the message of the one that `work` raised.
        ChildProcessError: a worker ended without a report: it was killed, or it left Python.
        RuntimeError: `work` raised something else; with its traceback.
    """
    if len(parts) == 1:
        work(parts[0], advance)
        return
    context = multiprocessing.get_context("spawn")
    workers: dict[Connection, Any] = {}
    try:
        # Starting it with the first worker would unblock SIGINT again.
        resource_tracker.ensure_running()
        with _interrupts_held():
            for part in parts:
                receiver, sender = context.Pipe(duplex=False)
                workers[receiver] = context.Process(target=_work, args=(work, part, sender))
                workers[receiver].start()
                # Now only the worker holds this end, which closes however the worker ends.
                sender.close()
        _listen(workers, advance)
    finally:
        _end([worker for worker in workers.values() if worker.pid is not None])
        for receiver in workers:
            receiver.close()


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """SIGINT (Ctrl-C) waits until the block ends; processes started in the block never get it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _listen(workers: Mapping[Connection, Any], advance: Advance) -> None:
    """Until all are done. A worker sends counts of bytes, and at the end None or its error."""
    running = set(workers)
    while running:
        for receiver in wait(list(running)):
            assert isinstance(receiver, Connection)
            try:
                message = receiver.recv()
            except (EOFError, OSError):
                raise ChildProcessError(_how_it_ended(workers[receiver])) from None
            if isinstance(message, Exception):
                raise message
            if message is None:
                running.remove(receiver)
            else:
                advance(message)


def _how_it_ended(worker: Any) -> str:
    worker.join(END_S)
    code = worker.exitcode
    if code is None or code >= 0:
        return f"a worker process ended with code {code} before it was done"
    why = "; the memory may have run out" if code == -signal.SIGKILL else ""
    return f"a worker process was ended by {signal.Signals(-code).name}{why}"


def _end(workers: Sequence[Any]) -> None:
    for worker in workers:
        worker.terminate()
    for worker in workers:
        worker.join(END_S)
        if worker.is_alive():
            worker.kill()
            worker.join(END_S)


def _work(work: Callable[[Any, Advance], None], part: Any, sender: Connection) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import torch

    torch.set_num_threads(1)
    unreported, lock = 0, threading.Lock()

    def advance(nbytes: int) -> None:
        nonlocal unreported
        with lock:
            unreported += nbytes
            if unreported >= REPORT_BYTES:
                sender.send(unreported)
                unreported = 0

    failure: Exception | None = None
    # Plain exceptions with the message alone: others may not pickle.
    try:
        work(part, advance)
    except ValueError as error:
        failure = ValueError(str(error))
    except OSError as error:
        failure = OSError(str(error))
    except Exception:  # noqa: BLE001 - the parent raises it
        failure = RuntimeError(f"a worker process failed:\n{traceback.format_exc()}")
    with lock:
        sender.send(unreported)
        sender.send(failure)


def _end_with_parent() -> None:
    """Exits with the parent, which cannot end its workers when it is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
