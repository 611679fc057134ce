"""Draws evaluations over what they cost: the mean of each against the tokens that were sampled for a trajectory."""

import json
from collections.abc import Sequence
from pathlib import Path

from slimrl.evaluation.folder import EvalFolder


def write_plot(folders: Sequence[EvalFolder], out: Path, title: str = "") -> None:
    """Draw one point with its 95% interval for each evaluation and set.

    Args:
        folders: of complete evaluations; a point bears the folder's name.
        out: the PNG file to write.

    Raises:
        ValueError: an evaluation is not complete.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import ScalarFormatter

    unfinished = [str(one.path) for one in folders if not one.summary.is_file()]
    if unfinished:
        raise ValueError(f"no complete evaluation in {', '.join(unfinished)}. Give folders of `slimrl eval --out`.")
    results = {one.path.name: json.loads(one.summary.read_text())["sets"] for one in folders}
    figure, axes = plt.subplots(figsize=(8, 4.8), layout="constrained")
    measures = []
    for number, name in enumerate(dict.fromkeys(name for sets in results.values() for name in sets)):
        given = [(label, sets[name]) for label, sets in results.items() if name in sets]
        for label, one in sorted(given, key=lambda pair: pair[1]["tokens_mean"]):
            measure = "accuracy" if "accuracy" in one["intervals"] else next(iter(one["intervals"]))
            low, high = one["intervals"][measure]
            mean, tokens = one[measure], one["tokens_mean"]
            measures.append(measure)
            axes.errorbar(
                tokens, mean, [[mean - low], [high - mean]], fmt="o", capsize=3, color=f"C{number}",
                label=None if name in axes.get_legend_handles_labels()[1] else name,
            )  # fmt: skip
            # Above and below in turn, since the points of like searches lie near each other.
            axes.annotate(
                label, (tokens, mean), textcoords="offset points", xytext=(6, (5, -12)[len(measures) % 2]), fontsize=9
            )
    axes.set_xscale("log")
    for at in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
        at(ScalarFormatter())
    axes.set_xlabel("sampled tokens of a trajectory, mean")
    axes.set_ylabel(", ".join(dict.fromkeys(measures)))
    axes.set_title(title)
    if len({name for sets in results.values() for name in sets}) > 1:
        axes.legend(title="set", frameon=False)
    axes.grid(color="#e5e7eb", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=150, facecolor="white")
    plt.close(figure)
