"""Everything that a frame of `slimrl watch` shows, from top to bottom."""

from datetime import datetime

from rich.console import Group, RenderableType
from rich.text import Text

from slimrl.config.yaml_source import display_path
from slimrl.observability.watch.answers import answers_table
from slimrl.observability.watch.curves import curve_panels
from slimrl.observability.watch.present import duration_text, present
from slimrl.observability.watch.speed import seconds_left, speed_table
from slimrl.observability.watch.view import View

OTHER_ROWS = 26
"""Rows of a frame beside the curves, answers included"""
CURVE_ROWS = (7, 16)
"""Smallest and largest number of rows of the curves"""
_STYLES = {"starting": "green", "running": "green", "complete": "green", "preempted": "yellow"}


def frame(view: View, at: float, width: int, height: int) -> Group:
    """
    Args:
        at: the time, in seconds since 1970.
    """
    fewest, most = CURVE_ROWS
    parts: list[RenderableType] = [_head(view, at)]
    if view.now is not None and view.is_running:
        parts.append(present(view.now, at))
    parts.append(curve_panels(view.run.steps, width, min(most, max(fewest, height - OTHER_ROWS))))
    parts += [
        part
        for part in (speed_table(view.run.steps), answers_table(view.source, view.samples, width, 3))
        if part is not None
    ]
    spaced = [line for part in parts for line in (part, Text(""))]
    return Group(*spaced[:-1])


def _head(view: View, at: float) -> Text:
    """Name, state and step; how long a run has taken and will take, or why it ended."""
    state = view.state
    head = Text.assemble(
        (display_path(view.folder.path), "bold"), "  ", (state["word"], _STYLES.get(state["word"], "red"))
    )
    head.append(f"  step {state['step']} of {state['steps']}")
    if not view.is_running:
        head.append(f"\n{state['cause']}" if state["cause"] else "")
        return head
    if view.run.starts:
        begun = datetime.fromisoformat(view.run.starts[-1]["time"]).timestamp()
        head.append(f"  {duration_text(at - begun)} so far")
    written = view.folder.metrics.stat().st_mtime if view.run.steps else at
    if (left := seconds_left(view.run.steps, state["steps"], at - written)) is not None:
        head.append(f", about {duration_text(left)} left")
    head.append(f"\n{state['cause']}", style="dim")
    return head
