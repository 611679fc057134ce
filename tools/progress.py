"""A progress bar with bytes per second, on stderr; without a terminal only its last line is printed."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from slimrl.observability.terminal import plain_console

Advance = Callable[[int], None]
"""Adds to the bytes that are done; thread-safe."""


@contextmanager
def byte_progress(title: str, total_bytes: int) -> Iterator[Advance]:
    """A bar up to `total_bytes`; if the block ends without error, a line with the bytes and their rate."""
    console = plain_console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    started = time.monotonic()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield partial(progress.advance, progress.add_task(title, total=total_bytes))
    seconds, done = max(time.monotonic() - started, 1e-6), int(progress.tasks[0].completed)
    rate = decimal(int(done / seconds))
    console.print(f"{title}: {decimal(done)} in {seconds:.1f} s, {rate}/s")
