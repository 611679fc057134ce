"""What `slimrl report` prints of where the time of steps goes."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from rich import box
from rich.console import Group
from rich.padding import Padding
from rich.table import Table

from slimrl.observability.profiling.breakdown import StepProfile

PHASES = ("rollout", "logprobs", "train", "drain", "eval_wait", "resync", "other")
"""Metrics `time/<phase>_s` that add up to `time/step_s`; a run lacks those that it never enters."""
MOST_ROWS = 12
"""Largest number of rows of a process; what is left is one row more."""


def phases_table(steps: Sequence[dict[str, Any]]) -> Table | None:
    """Table of the seconds of a run's phases, from the metrics of all steps but the first, which warms up; None without
    others.

    Evaluations follow, which are no part of a step.
    """
    counted = [line for line in steps if "time/step_s" in line and "time/other_s" in line and line["step"] > 1]
    if not counted:
        return None
    total = sum(line["time/step_s"] for line in counted)
    table = _table(f"{len(counted)} steps, without the first", "phase", "seconds, median", "mean", "of the step")
    for phase in (*PHASES, "step"):
        if not any(f"time/{phase}_s" in line for line in counted):
            continue
        values = [line.get(f"time/{phase}_s", 0.0) for line in counted]
        mean = sum(values) / len(values)
        table.add_row(phase, f"{median(values):.3f}", f"{mean:.3f}", f"{sum(values) / total:.1%}")
    if evaluations := [line["time/eval_s"] for line in counted if "time/eval_s" in line]:
        mean = sum(evaluations) / len(evaluations)
        table.add_row(f"evaluation, {len(evaluations)} of them", f"{median(evaluations):.3f}", f"{mean:.3f}", "")
    return table


def profile_tables(profile: StepProfile) -> Group:
    """Tables of one recorded step."""
    table = _table(f"step {profile.number}, of its profile", "driver", "seconds", "of the step")
    for name, seconds in (*profile.phases.items(), ("step", profile.seconds)):
        table.add_row(name, f"{seconds:.3f}", f"{seconds / profile.seconds:.1%}")
    of_processes = [_of_process(profile, process) for process in sorted(profile.processes)]
    return Group(table, *(Padding(each, (1, 0, 0, 0), expand=False) for each in of_processes))


def _of_process(profile: StepProfile, process: str) -> Table:
    rows, num_tracks = list(profile.processes[process].items()), profile.tracks[process]
    title = process if num_tracks == 1 else f"{process}, sums of {num_tracks} tracks"
    table = _table(title, "what", "seconds of its own", "times", "ms each")
    for name, (seconds, count) in rows[:MOST_ROWS]:
        table.add_row(name, f"{seconds:.3f}", str(count), f"{1000 * seconds / count:.2f}")
    if rest := rows[MOST_ROWS:]:
        count = sum(count for _, (_, count) in rest)
        table.add_row(f"{len(rest)} others", f"{sum(seconds for _, (seconds, _) in rest):.3f}", str(count), "")
    if num_tracks == 1:
        table.add_row("nothing", f"{profile.seconds - sum(seconds for _, (seconds, _) in rows):.3f}", "", "")
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table
