"""What a run does at present, and how many of its engines serve."""

from datetime import timedelta

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from slimrl.observability.now_file import Doing, Now

BAR_WIDTH = 30


def duration_text(seconds: float) -> str:
    """Such as `0:04:10`."""
    return str(timedelta(seconds=int(max(0.0, seconds))))


def present(now: Now, at: float) -> Group:
    """What is done, with a bar for each part that is counted, and the engines.

    Args:
        at: the time, in seconds since 1970.
    """
    said = [] if now.step is None else [f"step {now.step}"]
    said += [f"{holder.name} for {duration_text(at - holder.since)}" for holder in now.doing[:1]]
    parts: list[RenderableType] = [Text(": ".join(said) or "between two steps", style="bold")]
    if counted := [one for one in now.doing if one.total]:
        bars = Table.grid(padding=(0, 1))
        for one in counted:
            bars.add_row("", one.said, ProgressBar(one.total, one.done, width=BAR_WIDTH), _left(one, at))
        parts.append(bars)
    return Group(*parts, *(Text(text) for text in engine_lines(now.engines)))


def _left(one: Doing, at: float) -> str:
    """`0:00:12, about 0:01:10 left`."""
    took = at - one.since
    left = f", about {duration_text(took / one.done * (one.total - one.done))} left" if one.total and one.done else ""
    return duration_text(took) + left


def engine_lines(engines: dict[str, dict[str, float]]) -> list[str]:
    """A line for each role: `engines: 2 of 3 serve, 1 down`."""
    load = engines.get("load")
    lines = []
    for role, counts in engines.items():
        if role == "load":
            continue
        said = [f"{counts['serving']:g} of {sum(counts.values()):g} serve"]
        said += [
            f"{counts[kind]:g} {words}"
            for kind, words in (
                ("evaluating", "for evaluations"),
                ("waiting", "waiting for weights"),
                ("down", "starting again or ended"),
            )
            if counts[kind]
        ]
        lines.append(f"{role}: {', '.join(said)}")
    if load and lines:
        lines[0] += f"; {load['requests']:g} requests under way, fullest cache {load['usage']:.0%}"
    return lines
