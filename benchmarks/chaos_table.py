"""Faults and runs of sessions, and the tables of them."""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from figures import make_table
from rich.table import Table


@dataclass(kw_only=True)
class Record:
    """A fault."""

    leg: str
    mode: str
    kind: str
    at_s: float
    """Since the first step of the leg"""
    what: str = ""
    ended: bool = False
    """Whether the run ended as it should, and was continued"""
    end_s: float | None = None
    """From the fault's begin to the end of the driver's process"""
    recovery_s: float | None = None
    """From the fault's begin until what it took serves again, it is over, and a step has been completed since then"""
    lost_steps: int = 0
    """Steps that were completed when the fault began, and done again"""
    problem: str = ""


@dataclass(kw_only=True)
class Verdict:
    """A leg."""

    leg: str
    mode: str
    seconds: float = 0.0
    """From the first steps to the preemption"""
    steps: int = 0
    starts: int = 0
    """Starts of the driver"""
    problems: list[str] = field(default_factory=list)
    ledger: dict[str, int] = field(default_factory=dict)
    """Groups of an asynchronous run by how they left"""
    equal: bool | None = None
    """Whether metrics and export of a deterministic run are those of one to which nothing happened"""


def figures(records: Iterable[Record], verdicts: Iterable[Verdict]) -> dict[str, Any]:
    return {"faults": [asdict(one) for one in records], "legs": [asdict(one) for one in verdicts]}


def merged(files: Iterable[Mapping[str, Any]]) -> tuple[list[Record], list[Verdict]]:
    """The faults and legs of several results."""
    records, verdicts = [], []
    for file in files:
        records += [Record(**one) for one in file["faults"]]
        verdicts += [Verdict(**one) for one in file["legs"]]
    return records, verdicts


def problems(records: Iterable[Record], verdicts: Iterable[Verdict]) -> list[str]:
    return [
        *(f"{one.leg}: {one.kind} ({one.what}) at {one.at_s:.0f} s: {one.problem}" for one in records if one.problem),
        *(f"{one.leg}: {text}" for one in verdicts for text in one.problems),
    ]


def hours_of(records: list[Record]) -> float:
    """From the first steps of each run to its last fault's recovery; the faults of a run stand one after the other."""
    ends_s: list[float] = []
    for before, one in zip([None, *records], records, strict=False):
        if before is not None and before.leg == one.leg and before.at_s < one.at_s:
            ends_s.pop()
        ends_s.append(one.at_s + (one.recovery_s or 0.0))
    return sum(ends_s) / 3600


def table_of_kinds(records: list[Record]) -> Table:
    columns = (
        "kind",
        "modes",
        "faults",
        "went on",
        "continued",
        "bad",
        "to end s",
        "median s",
        "longest s",
        "steps lost",
    )
    table = make_table(f"{len(records)} faults in {hours_of(records):.2f} h", columns, labels=2)
    for kind in sorted({one.kind for one in records}):
        of_kind = [one for one in records if one.kind == kind]
        good = [one for one in of_kind if not one.problem]
        seconds = [one.recovery_s for one in good if one.recovery_s is not None]
        table.add_row(
            kind,
            ", ".join(sorted({one.mode for one in of_kind})),
            str(len(of_kind)),
            str(sum(not one.ended for one in good)),
            str(sum(one.ended for one in good)),
            str(len(of_kind) - len(good)),
            longest([one.end_s for one in good if one.end_s is not None]),
            f"{statistics.median(seconds):.1f}" if seconds else "",
            longest(seconds),
            str(max((one.lost_steps for one in good), default=0)),
        )
    return table


def longest(seconds: list[float]) -> str:
    return f"{max(seconds):.1f}" if seconds else ""


def table_of_legs(verdicts: list[Verdict]) -> Table:
    table = make_table("runs", ("run", "seconds", "steps", "starts", "groups", "as undisturbed", "problems"), labels=1)
    for one in verdicts:
        groups = ", ".join(f"{name} {count}" for name, count in sorted(one.ledger.items()))
        equal = "" if one.equal is None else "yes" if one.equal else "no"
        table.add_row(
            one.leg, f"{one.seconds:.0f}", str(one.steps), str(one.starts), groups, equal, str(len(one.problems))
        )
    return table
