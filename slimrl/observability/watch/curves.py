"""The reward over the steps and the evaluations, side by side."""

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from slimrl.observability.watch.braille import braille_rows

FIRST = ("reward/mean", "sft/loss", "policy/loss")
"""What the first panel shows: the first of these that the run has"""
NARROWEST_PANEL = 36
"""Smallest width of a panel in characters"""
LABEL_WIDTH = 7


def curve_panels(steps: Sequence[dict[str, Any]], width: int, height: int) -> RenderableType:
    """As many panels as fit into the width; the evaluations that have none are named with their newest value.

    Args:
        steps: metrics of each step.
        height: rows, those of titles and axes included.
    """
    names = [*[name for name in FIRST if _series(steps, name)][:1], *_evaluations(steps)]
    if not names:
        return Text("no step has ended yet", style="dim")
    shown = names[: max(1, width // NARROWEST_PANEL)]
    every_step = [x for name in shown for x, _ in _series(steps, name)]
    x_range = (min(every_step), max(every_step))
    grid = Table.grid(padding=(0, 2), expand=False)
    of_panel = (width - 2 * (len(shown) - 1)) // len(shown)
    left = [f"{name} {_series(steps, name)[-1][1]:.4g}" for name in names[len(shown) :]]
    rows = height - 2 - bool(left)
    grid.add_row(*(_panel(name, _series(steps, name), of_panel, rows, x_range) for name in shown))
    return Group(grid, Text("  ".join(left))) if left else grid


def _evaluations(steps: Sequence[dict[str, Any]]) -> list[str]:
    found = dict.fromkeys(name for line in steps for name in line)
    return [name for name in found if name.startswith("eval/") and name.endswith("/reward_mean")]


def _series(steps: Sequence[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    return [(line["step"], line[name]) for line in steps if line.get(name) is not None]


def _panel(
    name: str, points: list[tuple[float, float]], width: int, rows: int, x_range: tuple[float, float]
) -> Group | Text:
    if not points:
        return Text(f"{name}: no number")
    values = [value for _, value in points]
    y_range = (min(values), max(values))
    drawn = braille_rows(points, width=width - LABEL_WIDTH - 1, height=rows, x_range=x_range, y_range=y_range)
    labels = [""] * rows
    labels[-1], labels[0] = f"{y_range[0]:.3g}", f"{y_range[1]:.3g}"
    step, value = points[-1]
    title = Text(f"{name} {value:.4g}", style="bold")
    title.append(f" at step {step:g}" if len(points) > 1 or step else "", style="dim")
    lines = [
        Text.assemble((f"{label:>{LABEL_WIDTH}} ", "dim"), (line, "cyan"))
        for label, line in zip(labels, drawn, strict=True)
    ]
    ends = f"{x_range[0]:g}", f"{x_range[1]:g}"
    axis = f"{ends[0]}{ends[1]:>{width - LABEL_WIDTH - 1 - len(ends[0])}}" if ends[0] != ends[1] else ends[0]
    return Group(title, *lines, Text(" " * (LABEL_WIDTH + 1) + axis, style="dim"))
