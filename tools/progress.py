"""A progress bar with bytes per second, on stderr; without a terminal it is silent until its last line."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from slimrl.observability.terminal import plain_console

Advance = Callable[[int], None]
"""Counts some more bytes as done; from any thread."""


@contextmanager
def byte_progress(title: str, total_bytes: int) -> Iterator[Advance]:
    """A bar that runs to `total_bytes`, and a line with the bytes and their rate when the block ends without error."""
    console = plain_console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    started, done, lock = time.monotonic(), 0, threading.Lock()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=total_bytes)

        def advance(nbytes: int) -> None:
            nonlocal done
            with lock:
                done += nbytes
            progress.advance(task, nbytes)

        yield advance
    seconds = max(time.monotonic() - started, 1e-6)
    rate = decimal(int(done / seconds))
    console.print(f"{title}: {decimal(done)} in {seconds:.1f} s, {rate}/s")
