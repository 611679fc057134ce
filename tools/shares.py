"""Work on files spread over processes, each with its own share of it; what they report and how they fail comes back."""

import multiprocessing
import os
import queue
import signal
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from slimrl_tools.progress import Advance

Share = TypeVar("Share")

REPORT_BYTES = 16 * 1024**2
"""A process reports its progress whenever it has done so much more."""

POLL_S = 1.0
END_S = 10.0
"""How long a process may take to end when it is told to."""


def cut_shares(sizes: Mapping[str, int], processes: int) -> list[list[str]]:
    """Names in at most `processes` shares of about equal sizes, none empty, the order kept within each."""
    shares: list[list[str]] = [[] for _ in range(min(processes, max(1, len(sizes))))]
    filled = [0] * len(shares)
    for name, size in sizes.items():
        least = min(range(len(shares)), key=lambda number: filled[number])
        shares[least].append(name)
        filled[least] += size
    return shares


def run_shares(work: Callable[[Share, Advance], None], shares: Sequence[Share], advance: Advance) -> None:
    """Call `work` on every share, each in a process of its own; a single share in this one.

    Args:
        work: can be pickled; told the function to which it reports bytes that are done.

    Raises:
        OSError: and ValueError: as `work` raised them, in whichever process; the others are ended.
        RuntimeError: `work` failed otherwise, or a process died.
    """
    if len(shares) == 1:
        work(shares[0], advance)
        return
    context = multiprocessing.get_context("spawn")
    messages: Any = context.Queue()
    processes = [context.Process(target=_child, args=(work, share, messages)) for share in shares]
    try:
        for process in processes:
            process.start()
        _listen(processes, messages, advance)
    finally:
        for process in processes:
            if process.pid is None:
                continue
            process.terminate()
            process.join(END_S)
            if process.is_alive():
                process.kill()
                process.join(END_S)


def _listen(processes: Sequence[Any], messages: Any, advance: Advance) -> None:
    """Until all are done; each of them sends None as its last message."""
    running = len(processes)
    while running:
        try:
            message = messages.get(timeout=POLL_S)
        except queue.Empty:
            dead = [process.exitcode for process in processes if process.exitcode not in (None, 0)]
            if dead:
                raise RuntimeError(f"a process of the work died with exit code {dead[0]}") from None
            continue
        if isinstance(message, Exception):
            raise message
        if message is None:
            running -= 1
        else:
            advance(message)


def _child(work: Callable[[Any, Advance], None], share: Any, messages: Any) -> None:
    # Ctrl-C reaches every process of the terminal; the parent ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    unreported, lock = 0, threading.Lock()

    def advance(nbytes: int) -> None:
        nonlocal unreported
        with lock:
            unreported += nbytes
            if unreported >= REPORT_BYTES:
                messages.put(unreported)
                unreported = 0

    try:
        work(share, advance)
    except (OSError, ValueError) as error:
        messages.put(error)
    except Exception:  # noqa: BLE001 - the parent raises it
        messages.put(RuntimeError(f"a process of the work failed:\n{traceback.format_exc()}"))
    else:
        messages.put(unreported)
        messages.put(None)


def _end_with_parent() -> None:
    """A killed parent cannot end its children."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
