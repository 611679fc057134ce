"""The table at the end of the GPU suite: what ran, what it proves, and figures against a copy of the device."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

PROVES, FIGURE = "proves", "figure"
"""Names of properties of a test; it may have several figures."""

TIERS = {"tier_a": "A", "tier_b": "B", "two": "2 GPUs"}
"""Name in the table by folder"""


@dataclass(frozen=True, kw_only=True)
class Row:
    tier: str
    test: str
    outcome: str
    seconds: float
    proves: str
    figures: tuple[str, ...]


def rows(stats: Mapping[str, Iterable[Any]]) -> list[Row]:
    """One row for each test in the terminal reporter's reports by outcome, in order of tiers."""
    found = [
        _row(report, outcome)
        for outcome in ("passed", "failed", "error", "skipped")
        for report in stats.get(outcome, ())
        # A file whose import failed has a report too, which belongs to no test.
        if report.when == "call" or (outcome != "passed" and report.when != "collect")
    ]
    return sorted(found, key=lambda row: (row.tier, row.test))


def table(found: Iterable[Row]) -> list[str]:
    """Lines of text."""
    lines = []
    for row in found:
        lines.append(f"{row.tier:<7}{row.outcome:<8}{row.seconds:>6.1f} s  {row.test}")
        lines.append(f"{'':<25}proves: {row.proves}" if row.outcome == "passed" else f"{'':<25}about: {row.proves}")
        lines += [f"{'':<25}{figure}" for figure in row.figures]
    return lines


def _row(report: Any, outcome: str) -> Row:
    path, _, name = report.nodeid.partition("::")
    properties = [(str(key), str(value)) for key, value in report.user_properties]
    return Row(
        tier=next((TIERS[part] for part in PurePosixPath(path).parts if part in TIERS), ""),
        test=name.removeprefix("test_").replace("_", " "),
        outcome=outcome,
        seconds=report.duration,
        proves=next((value for key, value in properties if key == PROVES), ""),
        figures=tuple(value for key, value in properties if key == FIGURE),
    )
