"""The all-reduce probe: the chosen nodes sum a tensor over the network before Ray starts on them.

The job's side, with the plan of the Ray cluster that follows; allreduce.py is the program on the nodes. Standard
library alone, see slurm.py.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slimrl.launch.attempt import AttemptFolder, start_step
from slimrl.launch.pairs import Pair, split_nodes
from slimrl.launch.ports import port_block
from slimrl.launch.reports import LaunchError, NodeReport, Selection, read_reports
from slimrl.launch.slurm import Allocation

START_S = 60.0
"""Seconds added to the deadline of the all-reduce: for srun, and for importing torch from a shared file system."""


class AllReduceProbe:
    """The all-reduce of a job's nodes, and which of them passed it."""

    def __init__(
        self,
        folder: AttemptFolder,
        allocation: Allocation,
        options: argparse.Namespace,
        reports: Mapping[str, NodeReport],
        stop: Callable[[], bool],
    ) -> None:
        self._folder, self._allocation, self._options = folder, allocation, options
        self._reports, self._stop = reports, stop
        self._rounds = 0
        self.nodes: list[str] = []
        self._passed: dict[str, NodeReport] = {}
        """Report of each node; its one address is that on the route to the head."""

    def run(self, selection: Selection) -> AllReduceProbe:
        """All-reduce between the selected nodes; good nodes that are left over replace those that fail.

        Raises:
            LaunchError: the all-reduce fails, and too few nodes are left without the bad ones.
            Preempted: `stop` turned true.
        """
        good = [node for node in self._allocation.nodes if node not in selection.bad]
        needed = len(selection.used)
        while True:
            self.nodes = good[:needed]
            self._passed = self._run_groups([self.nodes])
            if len(self._passed) == needed:
                return self
            bad = self._bad_nodes(good)
            for node, why in bad.items():
                print(f"all-reduce: left out {node}: {why}", flush=True)
            good = [node for node in good if node not in bad]
            if len(good) < needed:
                raise LaunchError(
                    f"all-reduce: {', '.join(bad)} failed; {len(good)} good nodes are left, {needed} needed. "
                    f"{self._logs}"
                )

    @property
    def ray_address(self) -> str:
        """Address HOST:PORT of the cluster's head."""
        return f"{self._address(self.nodes[0])}:{port_block(self._allocation.job_id).port('gcs')}"

    def plan(self) -> dict[str, Any]:
        """What every node needs to start its part of the Ray cluster.

        Raises:
            LaunchError: too many nodes share one address.
        """
        allocation, options = self._allocation, self._options
        nodes: dict[str, dict[str, Any]] = {}
        lanes: dict[str, int] = {}
        for rank, node in enumerate(self.nodes):
            address = self._address(node)
            lane = lanes[address] = lanes.get(address, -1) + 1
            ports = port_block(allocation.job_id, lane)
            nodes[node] = {
                "rank": rank,
                "address": address,
                "interface": self._passed[node].addresses[address],
                "first_port": ports.first,
                "cores": options.cores_per_node or self._reports[node].cores,
            }
        return {
            "job_id": allocation.job_id,
            "ray_address": self.ray_address,
            "token_file": str(self._folder.token),
            "gpus": options.gpus_per_node,
            "object_store_bytes": int(options.object_store_gib * 2**30),
            "nodes": nodes,
        }

    def _address(self, node: str) -> str:
        return next(iter(self._passed[node].addresses))

    def _bad_nodes(self, good: Sequence[str]) -> dict[str, str]:
        """Bad nodes among those that may be used, and how each failed.

        Raises:
            LaunchError: the failure cannot be put down to any node.
        """
        if len(self.nodes) == 1:
            return {self.nodes[0]: "fails even alone"}
        proven, bad = split_nodes(good, self._run_pairs)
        if bad:
            return {node: f"fails in a pair with {helper}, which passes with others" for node, helper in bad.items()}
        what = "every node passes in a pair" if proven else "no pair of nodes passes either"
        silent = [node for node in self.nodes if node not in self._passed]
        raise LaunchError(
            f"the all-reduce of {len(self.nodes)} nodes failed, but {what}, so no node is known to be bad. "
            f"No report came from {', '.join(silent)}. {self._logs}"
        )

    def _run_pairs(self, pairs: Sequence[Pair]) -> set[Pair]:
        passed = self._run_groups(pairs)
        return {pair for pair in pairs if passed.keys() >= set(pair)}

    @property
    def _logs(self) -> str:
        return f"Logs: {self._folder.path}/allreduce_*.log"

    def _run_groups(self, groups: Sequence[Sequence[str]]) -> dict[str, NodeReport]:
        """All-reduce within each group, side by side; returns the reports of the nodes that passed.

        Raises:
            Preempted: `stop` turned true, so missing reports say nothing about the nodes.
        """
        name = f"allreduce_{self._rounds}"
        self._rounds += 1
        folder = self._folder.path / name
        folder.mkdir()
        plan = folder / "groups.plan"
        plan.write_text(json.dumps({"groups": [self._group(group, i) for i, group in enumerate(groups)]}))
        options = self._options
        step = start_step(
            self._folder,
            options,
            name,
            [node for group in groups for node in group],
            "slimrl.launch.allreduce",
            *(f"--plan={plan}", f"--gpus={options.gpus_per_node}", f"--timeout-s={options.allreduce_timeout_s}"),
            stop_together=False,
        )
        step.wait(options.allreduce_timeout_s + START_S, self._stop)
        return read_reports(folder)

    def _group(self, nodes: Sequence[str], index: int) -> dict[str, Any]:
        return {
            "nodes": list(nodes),
            "hosts": {node: self._allocation.hosts[node] for node in nodes},
            # "Nodes" of one machine must not listen on the same port.
            "port": port_block(self._allocation.job_id).port("preflight") + index,
        }
