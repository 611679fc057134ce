"""Progress bars on stderr: of bytes, of a folder that grows, and of things that are counted."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as RichProgress

from slimrl.observability.progress import Progress
from slimrl.observability.terminal import plain_console

LOOK_S = 1.0
"""Seconds between two looks at a folder"""

Advance = Callable[[int], None]
"""Adds to what is done; thread-safe."""


@contextmanager
def byte_progress(title: str, total_bytes: int) -> Iterator[Advance]:
    """A bar up to `total_bytes` with bytes per second; if the block ends without error, a line with the bytes and their
    rate. Without a terminal only that line is printed."""
    console = plain_console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    started = time.monotonic()
    with RichProgress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield partial(progress.advance, progress.add_task(title, total=total_bytes))
    seconds, done = max(time.monotonic() - started, 1e-6), int(progress.tasks[0].completed)
    rate = decimal(int(done / seconds))
    console.print(f"{title}: {decimal(done)} in {seconds:.1f} s, {rate}/s")


@contextmanager
def count_progress(title: str, total: int | None, unit: str) -> Iterator[Advance]:
    """A bar up to `total` with the time left, which goes away at the end; a line every 10 s without a terminal.

    Args:
        total: None if it is not known.
        unit: plural of what is counted, such as `questions`.
    """
    with Progress(0, plain_console(stderr=True)) as progress, progress.phase(title, total, unit) as phase:
        yield phase.advance


@contextmanager
def folder_progress(title: str, folder: Path, total_bytes: int) -> Iterator[None]:
    """`byte_progress` of a folder that another process fills, by the size of its files."""
    ended = threading.Event()
    with byte_progress(title, total_bytes) as advance:

        def look() -> None:
            seen = 0
            while not ended.wait(LOOK_S):
                seen += _advance_to(folder, seen, advance)
            _advance_to(folder, seen, advance)

        looking = threading.Thread(target=look, daemon=True)
        looking.start()
        try:
            yield
        finally:
            ended.set()
            looking.join()


def _advance_to(folder: Path, seen: int, advance: Advance) -> int:
    """Add what a folder has grown by since `seen` bytes."""
    grown = max(0, _size_of(folder) - seen)
    advance(grown)
    return grown


def _size_of(folder: Path) -> int:
    """Bytes of the files below a folder, which may come and go meanwhile."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(where, name)).st_size
            except FileNotFoundError:
                continue
    return total
