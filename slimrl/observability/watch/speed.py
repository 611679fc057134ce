"""How fast a run is: seconds of a step by phase, tokens a second, and the time that is left."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from rich.table import Table

from slimrl.observability.profiling.tables import PHASES

LAST = 20
"""Number of the last steps whose median is shown, and of whose mean the time left is estimated"""


def speed_table(steps: Sequence[dict[str, Any]]) -> Table | None:
    """Seconds of each phase and tokens a second, of the newest step and of the last ones; None without a step."""
    timed = [line for line in steps if "time/step_s" in line and line["step"] > 0][-LAST:]
    if not timed:
        return None
    phases = [phase for phase in PHASES if any(f"time/{phase}_s" in line for line in timed)]
    table = Table.grid(padding=(0, 3))
    table.add_row("", *phases, "step", "tokens/s", style="dim")
    rows = {f"step {timed[-1]['step']}": timed[-1:]}
    if len(timed) > 1:
        rows[f"median of {len(timed)}"] = timed
    for title, lines in rows.items():
        seconds = [median(line.get(f"time/{phase}_s") or 0.0 for line in lines) for phase in (*phases, "step")]
        rates = [rate for line in lines if (rate := tokens_per_s(line)) is not None]
        table.add_row(title, *(f"{value:.2f} s" for value in seconds), f"{median(rates):,.0f}" if rates else "")
    return table


def tokens_per_s(line: dict[str, Any]) -> float | None:
    """Sampled tokens a second of the rollout, or those of a step of supervised training; None where not known."""
    if "rollout/tokens_per_s" in line:
        rate: float | None = line["rollout/tokens_per_s"]
        return rate
    if line.get("sft/tokens") is None or not line.get("time/step_s"):
        return None
    return float(line["sft/tokens"] / line["time/step_s"])


def seconds_left(steps: Sequence[dict[str, Any]], total: int, since_newest_s: float) -> float | None:
    """Estimate from the last steps and the mean time of evaluations; None before the first step has ended.

    Args:
        total: steps of the whole run.
        since_newest_s: how long ago the newest step was written.
    """
    timed = [line for line in steps if line.get("time/step_s") is not None and line["step"] > 0]
    if not timed:
        return None
    last = timed[-LAST:]
    each_s = sum(line["time/step_s"] for line in last) / len(last)
    each_s += sum(line.get("time/eval_s") or 0.0 for line in timed) / len(timed)
    return max(0.0, (total - timed[-1]["step"]) * each_s - since_newest_s)
