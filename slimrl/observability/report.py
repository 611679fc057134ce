"""curve.png: reward and held-out accuracy over the steps of one run or of several seeds, from metrics.jsonl."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimrl.observability.metrics import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

REWARD_COLOUR = "#7a8b99"
PANEL_COLOUR = "#334155"
EVAL_COLOURS = ("#c2410c", "#1d4ed8", "#15803d", "#7e22ce")
PANELS = (
    ("policy/clip_fraction", "clip fraction", "linear"),
    ("mismatch/logprob_abs_mean", "|log p trainer - log p engine|, mean", "log"),
)
"""Metric, title and scale of the small panels."""

Series = tuple[list[int], list[float]]


def series(steps: list[dict[str, Any]], name: str) -> Series:
    """(steps, values) of a metric, where it was recorded and finite."""
    pairs = [(line["step"], line[name]) for line in steps if line.get(name) is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]


def mean_series(runs: Sequence[Series]) -> Series:
    """Mean over the runs at each step that all of them recorded."""
    values = [dict(zip(*run, strict=True)) for run in runs]
    common = sorted(set.intersection(*[set(run) for run in values])) if values else []
    return common, [sum(run[step] for run in values) / len(values) for step in common]


def _draw(axes: "Axes", runs: Sequence[Series], colour: str, label: str, marker: str | None) -> None:
    """The runs thinly, their mean boldly with its label; one run is its own mean."""
    runs = [run for run in runs if run[0]]
    if not runs:
        return
    if len(runs) > 1:
        for run in runs:
            axes.plot(*run, color=colour, linewidth=0.8, alpha=0.4)
    axes.plot(*mean_series(runs), color=colour, linewidth=2.0, marker=marker, markersize=5, label=label)


def _draw_main(axes: "Axes", runs: list[list[dict[str, Any]]], title: str) -> None:
    sets = sorted({name for steps in runs for line in steps for name in line if name.startswith("eval/")})
    _draw(axes, [series(steps, "reward/mean") for steps in runs], REWARD_COLOUR, "reward/mean (training)", None)
    for index, name in enumerate(sets):
        colour = EVAL_COLOURS[index % len(EVAL_COLOURS)]
        _draw(axes, [series(steps, name) for steps in runs], colour, name, "o")
    axes.set(xlabel="step", ylabel="reward, accuracy", title=title)
    low, high = axes.get_ylim()
    if low >= -0.1 and high <= 1.1:
        axes.set_ylim(-0.02, 1.02)
    if axes.lines:
        axes.legend(loc="lower right", frameon=False)


def _draw_panel(axes: "Axes", runs: list[list[dict[str, Any]]], name: str, title: str, scale: str) -> None:
    _draw(axes, [series(steps, name) for steps in runs], PANEL_COLOUR, title, None)
    axes.set_title(title, fontsize=9)
    axes.tick_params(labelsize=8)
    if axes.lines:
        axes.set_yscale(scale)
    low, high = axes.get_ylim()
    if axes.get_yscale() == "log":
        axes.set_ylim(10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high)))
    else:
        axes.set_ylim(0, high)


def write_curve(metrics_files: Sequence[Path], out: Path, title: str = "") -> None:
    """Draw the learning curve.

    Args:
        metrics_files: metrics.jsonl of one run, or of several that differ in their seed.
        out: the PNG file to write.
        title: above the drawing.

    Raises:
        ValueError: a file has broken lines or no steps.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    runs = [read_metrics(path) for path in metrics_files]
    for path, steps in zip(metrics_files, runs, strict=True):
        if not steps:
            raise ValueError(f"{path} holds no steps.")
    figure, axes = plt.subplot_mosaic(
        [["main", "0"], ["main", "1"]], figsize=(10, 4.6), width_ratios=[2.1, 1], layout="constrained"
    )
    _draw_main(axes["main"], runs, title)
    for index, panel in enumerate(PANELS):
        _draw_panel(axes[str(index)], runs, *panel)
    axes["1"].set_xlabel("step", fontsize=9)
    for one in axes.values():
        one.xaxis.set_major_locator(MaxNLocator(integer=True))
        one.grid(color="#e5e7eb", linewidth=0.6)
        one.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=150, facecolor="white")
    plt.close(figure)
