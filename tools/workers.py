"""Work on files spread over processes, each with its own part of it; what they report and how they fail comes back."""

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from slimrl_tools.progress import Advance

Part = TypeVar("Part")

REPORT_BYTES = 16 * 1024**2
"""A worker reports its progress whenever it has done so much more."""

END_S = 10.0
"""How long a worker may take to end when it is told to."""

_ERRORS: dict[str, type[Exception]] = {"ValueError": ValueError, "OSError": OSError, "RuntimeError": RuntimeError}


def divide(sizes: Mapping[str, int], workers: int) -> list[list[str]]:
    """Names in at most `workers` parts of about equal sizes, none empty, the order kept within each."""
    parts: list[list[str]] = [[] for _ in range(min(workers, max(1, len(sizes))))]
    filled = [0] * len(parts)
    for name, size in sizes.items():
        least = min(range(len(parts)), key=lambda number: filled[number])
        parts[least].append(name)
        filled[least] += size
    return parts


def run_workers(work: Callable[[Part, Advance], None], parts: Sequence[Part], advance: Advance) -> None:
    """Call `work` on every part, each in a process of its own; a single part in this one.

    The first failure ends the others. It is waited for as long as every worker lives.

    Args:
        work: can be pickled; told the function to which it reports bytes that are done.

    Raises:
        ValueError: and OSError: with the message of what `work` raised, in whichever process.
        ChildProcessError: a worker ended without a word: it was killed, or it left Python.
        RuntimeError: `work` raised something else; with its traceback.
    """
    if len(parts) == 1:
        work(parts[0], advance)
        return
    context = multiprocessing.get_context("spawn")
    workers: dict[Connection, Any] = {}
    try:
        # Started with the first worker it would let interrupts through again.
        resource_tracker.ensure_running()
        with _interrupts_held():
            for part in parts:
                receiver, sender = context.Pipe(duplex=False)
                workers[receiver] = context.Process(target=_work, args=(work, part, sender))
                workers[receiver].start()
                # The worker alone holds this end now, so that it closes when the worker ends, in whatever way.
                sender.close()
        _listen(workers, advance)
    finally:
        _end([worker for worker in workers.values() if worker.pid is not None])
        for receiver in workers:
            receiver.close()


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C waits until the block ends, and never comes to processes started in it, not even while Python starts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _listen(workers: Mapping[Connection, Any], advance: Advance) -> None:
    """Until all are done; the last message of each is "done" or its error."""
    running = set(workers)
    while running:
        for receiver in wait(list(running)):
            assert isinstance(receiver, Connection)
            try:
                kind, content = receiver.recv()
            except (EOFError, OSError):
                raise ChildProcessError(_how_it_ended(workers[receiver])) from None
            if kind == "bytes":
                advance(content)
            elif kind == "done":
                running.remove(receiver)
            else:
                raise _ERRORS[kind](content)


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
                sender.send(("bytes", unreported))
                unreported = 0

    try:
        work(part, advance)
    except ValueError as error:
        last: tuple[str, Any] = "ValueError", str(error)
    except OSError as error:
        last = "OSError", str(error)
    except Exception:  # noqa: BLE001 - the parent raises it
        last = "RuntimeError", f"a worker process failed:\n{traceback.format_exc()}"
    else:
        last = "done", None
    with lock:
        sender.send(("bytes", unreported))
        sender.send(last)


def _end_with_parent() -> None:
    """A killed parent cannot end its children."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
