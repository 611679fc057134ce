"""Reports of nodes, and the selection of the nodes that a job uses.

1. A node without a report, or with problems, is bad.
2. A node with other versions than most nodes is bad.
3. Of the rest the first `needed` are used, in the order of the allocation; the first is the head.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from slimrl.base.atomic import write_whole


class LaunchError(RuntimeError):
    """The job failed; the message says why, and names the node if one is to blame."""


@dataclass(frozen=True)
class NodeReport:
    """The result of a node's checks, written by the node itself."""

    node: str
    problems: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of packages, Python and the GPU driver; `absent` if not installed."""
    addresses: dict[str, str] = field(default_factory=dict)
    """Network interface of each IPv4 address"""
    gpus: int = 0
    cores: int = 0
    free_gib: float = 0.0
    """Available memory in GiB"""


@dataclass(frozen=True)
class Selection:
    used: list[str]
    """Names of the nodes that the job uses, the head first"""
    bad: dict[str, str]
    """Reason why each bad node is left out, by its name"""


def write_report(folder: Path, report: NodeReport) -> None:
    """Write `folder/NODE.json`, atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / f"{report.node}.json", json.dumps(asdict(report), indent=2) + "\n")


def read_reports(folder: Path) -> dict[str, NodeReport]:
    """The reports in a folder, by node."""
    reports = [NodeReport(**json.loads(path.read_text())) for path in sorted(folder.glob("*.json"))]
    return {report.node: report for report in reports}


def select_nodes(
    nodes: Sequence[str], reports: Mapping[str, NodeReport], *, needed: int, unreported: Mapping[str, str]
) -> Selection:
    """
    Args:
        nodes: of the allocation, in its order.
        needed: number of nodes that the run uses.
        unreported: reason to give for each node that has no report.

    Raises:
        LaunchError: too few nodes are good; the message names every bad one.
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
    # Among equally common ones this is the first node's.
    common = json.loads(sets.most_common(1)[0][0])
    odd = {}
    for report in reports:
        differing = [
            f"{name} is {version}, on most nodes {common.get(name, 'absent')}"
            for name, version in report.versions.items()
            if version != common.get(name)
        ]
        if differing:
            odd[report.node] = ", ".join(differing)
    return odd
