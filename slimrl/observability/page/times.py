"""Where the time of a run's steps went, when it was restarted, and what a profile recorded."""

import json
from datetime import datetime
from typing import Any

from slimrl.observability.profiling.breakdown import step_profiles
from slimrl.observability.profiling.tables import MOST_ROWS, PHASES
from slimrl.observability.profiling.trace import read_spans
from slimrl.observability.run_files import Run

BESIDES = ("eval",)
"""Phases that are no part of a step"""


def times(run: Run) -> dict[str, Any]:
    """`step` and the seconds of each phase (`phases`), `restarts` and `replaced` engines as steps, `profiles`."""
    steps = [line for line in run.steps if "time/step_s" in line]
    names = [name for name in (*PHASES, *BESIDES) if any(f"time/{name}_s" in line for line in steps)]
    return {
        "step": [line["step"] for line in steps],
        "phases": {name: [line.get(f"time/{name}_s") or 0.0 for line in steps] for name in names},
        "restarts": _restarts(run),
        "replaced": [line["step"] for line in steps if line.get("resync/replaced_engines")],
        "profiles": _profiles(run),
    }


def _restarts(run: Run) -> list[int]:
    """First step of each start after the first that came to one: that of the first group which began later."""
    begun: list[tuple[float, int]] = []
    if len(run.starts) > 1 and run.folder.groups.is_file():
        for line in run.folder.groups.read_text().splitlines():
            # A killed process leaves a broken last line at most.
            if line.endswith("}"):
                group = json.loads(line)
                begun.append((group["begun"], group["step"]))
    found = []
    for start in run.starts[1:]:
        after = datetime.fromisoformat(start["time"]).timestamp()
        if steps := [step for time, step in begun if time >= after and step is not None]:
            found.append(min(steps))
    return sorted(set(found))


def _profiles(run: Run) -> list[dict[str, Any]]:
    """Each recorded step: its driver's phases, and the own seconds of each process by span, the longest first."""
    if not run.folder.profile.is_dir():
        return []
    profiles = []
    for step in step_profiles(read_spans(run.folder.profile)):
        processes = [
            {"name": name, "tracks": step.tracks[name], "spans": _longest(step.processes[name])}
            for name in sorted(step.processes)
        ]
        profiles.append({"step": step.number, "seconds": step.seconds, "phases": step.phases, "processes": processes})
    return profiles


def _longest(spans: dict[str, tuple[float, int]]) -> dict[str, float]:
    rows = list(spans.items())
    longest = {name: seconds for name, (seconds, _) in rows[:MOST_ROWS]}
    rest = sum(seconds for _, (seconds, _) in rows[MOST_ROWS:])
    return {**longest, **({"others": rest} if rest else {})}
