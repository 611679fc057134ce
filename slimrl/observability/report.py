"""curve.png: training and evaluation reward over the steps of one run or of several seeds, from metrics.jsonl.

A run without rewards, such as supervised training or training on a trajectory file, is drawn with its loss.
"""

import math
import re
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
"""Metric, title and scale of the small panels; a panel without values is left out."""
LOSSES = ("sft/loss", "policy/loss")
"""Metrics of which the first that was recorded is drawn where there are no rewards."""

MARKED = 30
"""Largest number of points of a curve with markers, without which one point would not be seen."""
TRAINING = {"linewidth": 1.2, "markersize": 3, "zorder": 3}
"""Style of the training's reward: drawn above the evaluations', which may cover it, and thinner"""

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


def _curves(runs: Sequence[list[dict[str, Any]]]) -> list[str]:
    """Metrics of the large panel: rewards, or else a loss."""
    recorded = {name for steps in runs for line in steps for name, value in line.items() if value is not None}
    names = [name for name in ("reward/mean",) if name in recorded]
    # The accuracy equals the mean reward, and parts of the reward and standard errors have scales of their own.
    others = re.compile(r"eval/[^/]+/(?!accuracy$|parts/|stderr/)")
    names += sorted(filter(others.match, recorded))
    return names or [name for name in LOSSES if name in recorded][:1]


def _draw(axes: "Axes", runs: Sequence[Series], colour: str, label: str, **style: Any) -> None:
    """Draw the runs with thin lines and their mean with a bold one, or as `style` says."""
    runs = [run for run in runs if run[0]]
    if not runs:
        return
    if len(runs) > 1:
        for run in runs:
            axes.plot(*run, color=colour, linewidth=0.8, alpha=0.4)
    mean = mean_series(runs)
    marker = "o" if len(mean[0]) <= MARKED else None
    style = {"linewidth": 2.0, "markersize": 5, **style}
    axes.plot(*mean, color=colour, marker=marker, label=label, **style)


def _draw_main(axes: "Axes", runs: Sequence[list[dict[str, Any]]], names: Sequence[str], title: str) -> None:
    colours = iter(EVAL_COLOURS * len(names))
    for name in names:
        values = [series(steps, name) for steps in runs]
        if name.startswith("eval/"):
            _draw(axes, values, next(colours), name)
        else:
            label = "reward/mean (training)" if name == "reward/mean" else name
            _draw(axes, values, REWARD_COLOUR, label, **TRAINING)
    is_loss = names[0] in LOSSES
    axes.set(xlabel="step", ylabel="loss" if is_loss else "reward", title=title)
    low, high = axes.get_ylim()
    if not is_loss and low >= -0.1 and high <= 1.1:
        axes.set_ylim(-0.02, 1.02)
    axes.legend(loc="upper right" if is_loss else "lower right", frameon=False)


def _draw_panel(axes: "Axes", runs: list[list[dict[str, Any]]], name: str, title: str, scale: str) -> None:
    _draw(axes, [series(steps, name) for steps in runs], PANEL_COLOUR, title, markersize=3)
    axes.set_title(title, fontsize=9)
    axes.tick_params(labelsize=8)
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

    Raises:
        ValueError: a file has broken lines or no steps, no file has a reward or a loss, or some have rewards and others
            a loss alone.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    runs = [read_metrics(path) for path in metrics_files]
    for path, steps in zip(metrics_files, runs, strict=True):
        if not steps:
            raise ValueError(f"{path} holds no steps.")
    drawn = {path: _curves([steps]) for path, steps in zip(metrics_files, runs, strict=True)}
    losses = [str(path) for path, names in drawn.items() if names and names[0] in LOSSES]
    if 0 < len(losses) < sum(map(bool, drawn.values())):
        raise ValueError(
            f"{', '.join(losses)}: a loss, where other runs have rewards. One figure is of one kind of run."
        )
    curves = _curves(runs)
    if not curves:
        raise ValueError(f"{', '.join(map(str, metrics_files))}: no reward or loss to draw.")
    panels = [panel for panel in PANELS if any(series(steps, panel[0])[0] for steps in runs)]
    figure, axes = plt.subplot_mosaic(
        [["main", name] for name, *_ in panels] or [["main"]],
        figsize=(10, 4.6),
        width_ratios=[2.1, 1] if panels else None,
        layout="constrained",
    )
    _draw_main(axes["main"], runs, curves, title)
    for panel in panels:
        _draw_panel(axes[panel[0]], runs, *panel)
    if panels:
        axes[panels[-1][0]].set_xlabel("step", fontsize=9)
    numbers = [line["step"] for steps in runs for line in steps]
    room = max(0.5, 0.04 * (max(numbers) - min(numbers)))
    for one in axes.values():
        # The same steps for all, so a panel of few values too has the ticks of steps.
        one.set_xlim(min(numbers) - room, max(numbers) + room)
        one.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        one.grid(color="#e5e7eb", linewidth=0.6)
        one.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=150, facecolor="white")
    plt.close(figure)
