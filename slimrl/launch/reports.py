"""What a node says of itself in the preflight, and which nodes of an allocation are used.

1. A node without a report, or with problems of its own, is out.
2. Versions are compared: a node that differs from what most have is out.
3. Of those that are left the first `needed` are used, in the order of the allocation; the first is the head.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path


class LaunchError(RuntimeError):
    """The job cannot go on; the message says why, and names the node where there is one."""


@dataclass(frozen=True)
class NodeReport:
    """Of one node, written by itself."""

    node: str
    problems: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    """Of the packages, the interpreter and the driver; `absent` for what is not installed."""
    addresses: dict[str, str] = field(default_factory=dict)
    """Network interface by IPv4 address."""
    gpus: int = 0
    cores: int = 0
    free_gib: float = 0.0
    """Memory that processes can get."""


@dataclass(frozen=True)
class Selection:
    """The nodes that a job uses, the head first, and why others are not used."""

    used: list[str]
    bad: dict[str, str]


def write_report(folder: Path, report: NodeReport) -> None:
    """As `folder/NODE.json`, which appears whole."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{report.node}.partial"
    partial.write_text(json.dumps(asdict(report), indent=2) + "\n")
    partial.replace(folder / f"{report.node}.json")


def read_reports(folder: Path) -> dict[str, NodeReport]:
    """Those that are there, by node."""
    reports = [NodeReport(**json.loads(path.read_text())) for path in sorted(folder.glob("*.json"))]
    return {report.node: report for report in reports}


def select_nodes(
    nodes: Sequence[str], reports: Mapping[str, NodeReport], *, needed: int, unreported: Mapping[str, str]
) -> Selection:
    """The nodes to go on with.

    Args:
        nodes: of the allocation, in its order.
        needed: how many the run takes.
        unreported: what is said of each node, should it have no report.

    Raises:
        LaunchError: too few are good; it names every bad one.
    """
    bad = {}
    for node in nodes:
        if node not in reports:
            bad[node] = unreported[node]
        elif reports[node].problems:
            bad[node] = "; ".join(reports[node].problems)
    bad |= _odd_versions([reports[node] for node in nodes if node not in bad])
    good = [node for node in nodes if node not in bad]
    if len(good) < needed:
        reasons = "".join(f"\n  {node}: {reason}" for node, reason in bad.items())
        spares = len(nodes) - needed
        raise LaunchError(f"preflight: {len(good)} of {len(nodes)} nodes are good, {needed} needed "
                          f"({spares} spare).{reasons}")  # fmt: skip
    return Selection(good[:needed], bad)


def _odd_versions(reports: Sequence[NodeReport]) -> dict[str, str]:
    if not reports:
        return {}
    sets = Counter(json.dumps(report.versions, sort_keys=True) for report in reports)
    # Counter keeps the order of the nodes among equals.
    common = json.loads(sets.most_common(1)[0][0])
    odd = {}
    for report in reports:
        names = sorted(set(common) | set(report.versions))
        differing = [
            f"{name} is {report.versions.get(name, 'absent')}, on most nodes {common.get(name, 'absent')}"
            for name in names
            if report.versions.get(name) != common.get(name)
        ]
        if differing:
            odd[report.node] = ", ".join(differing)
    return odd
