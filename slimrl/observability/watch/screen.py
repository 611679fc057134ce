"""Draws frames of a run until it ends."""

import time
from pathlib import Path

from rich.console import RenderableType
from rich.live import Live

from slimrl.observability.terminal import plain_console
from slimrl.observability.watch.frame import frame
from slimrl.observability.watch.view import View

INTERVAL_S = 1.0
"""Seconds between two frames"""
PIPED_COLUMNS, PIPED_ROWS = 110, 40


def watch(folder: Path, *, once: bool) -> None:
    """Show a run until it ends or the user interrupts; the last frame stays. Without a terminal it is one frame.

    Raises:
        ValueError: the folder holds no run, or a file of it cannot be read.
    """
    console = plain_console(soft_wrap=False, piped_columns=PIPED_COLUMNS)
    view = View(folder)

    def drawn() -> RenderableType:
        height = console.height if console.is_terminal else PIPED_ROWS
        return frame(view, time.time(), console.width, height)

    view.refresh()
    if view.is_running and console.is_terminal and not once:
        try:
            with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
                while view.is_running:
                    live.update(drawn(), refresh=True)
                    time.sleep(INTERVAL_S)
                    view.refresh()
        except KeyboardInterrupt:
            # To stop watching is no failure.
            pass
        # Its last metrics may have been written after they were read.
        view.refresh()
    console.print(drawn())
