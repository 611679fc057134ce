"""The all-reduce of the chosen nodes, as the job conducts it, and the plan of the cluster that follows from it.

Standard library alone, see slurm.py; what runs on the nodes is allreduce.py.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slimrl.launch.attempt import AttemptFolder, start_step
from slimrl.launch.options import node_python
from slimrl.launch.pairs import Pair, split_nodes
from slimrl.launch.ports import PortBlock, port_block
from slimrl.launch.reports import LaunchError, NodeReport, Selection, read_reports
from slimrl.launch.slurm import Allocation

START_S = 60.0
"""Beyond the deadline of the all-reduce: for srun, and for importing torch from a shared file system."""


class Meeting:
    """Nodes that have summed a tensor together."""

    def __init__(
        self,
        folder: AttemptFolder,
        allocation: Allocation,
        options: argparse.Namespace,
        reports: Mapping[str, NodeReport],
        *,
        container: Sequence[str],
        stop: Callable[[], bool],
    ) -> None:
        self._folder, self._allocation, self._options = folder, allocation, options
        self._reports, self._container, self._stop = reports, container, stop
        self._ports = port_block(allocation.job_id)
        self._rounds = 0
        self.nodes: list[str] = []
        self.met: dict[str, NodeReport] = {}
        """Report of each node, whose one address is that on the route to the head."""

    def meet(self, selection: Selection) -> Meeting:
        """Have the nodes meet; those that cannot are replaced by good ones that are left.

        Raises:
            LaunchError: the all-reduce fails, and the nodes without the bad ones are too few.
            Preempted: `stop` turned true.
        """
        good = [node for node in self._allocation.nodes if node not in selection.bad]
        needed = len(selection.used)
        while True:
            self.nodes = good[:needed]
            self.met = self._round([self.nodes])
            if len(self.met) == needed:
                return self
            bad = self._bad_nodes(good)
            for node, why in bad.items():
                print(f"all-reduce: left out {node}: {why}", flush=True)
            good = [node for node in good if node not in bad]
            if len(good) < needed:
                raise LaunchError(
                    f"all-reduce: {', '.join(bad)} did not come through; {len(good)} good nodes are left, "
                    f"{needed} needed. {self._logs}"
                )

    @property
    def ray_address(self) -> str:
        """HOST:PORT of the head."""
        return f"{self._address(self.nodes[0])}:{self._ports.port('gcs')}"

    def plan(self) -> dict[str, Any]:
        """What every node has to know to start its part of Ray.

        Raises:
            LaunchError: too many nodes share one address.
        """
        allocation, options = self._allocation, self._options
        nodes: dict[str, dict[str, Any]] = {}
        lanes: dict[str, int] = {}
        for rank, node in enumerate(self.nodes):
            address = self._address(node)
            lane = lanes[address] = lanes.get(address, -1) + 1
            try:
                ports = port_block(allocation.job_id, lane)
            except ValueError as error:
                raise LaunchError(str(error)) from error
            nodes[node] = {
                "rank": rank,
                "address": address,
                "interface": self.met[node].addresses[address],
                "first_port": ports.first,
                "cores": options.cores_per_node or self._reports[node].cores,
            }
        return {
            "job_id": allocation.job_id,
            "head_address": self._address(self.nodes[0]),
            "ray_address": self.ray_address,
            "first_port": self._ports.first,
            "token_file": str(self._folder.token),
            "gpus": options.gpus_per_node,
            "object_store_bytes": int(options.object_store_gib * 2**30),
            "nodes": nodes,
        }

    def _address(self, node: str) -> str:
        return next(iter(self.met[node].addresses))

    def _bad_nodes(self, good: Sequence[str]) -> dict[str, str]:
        """Of all nodes that may be used, those that do not come through, and why that is said of them.

        Raises:
            LaunchError: it cannot be said of any node.
        """
        if len(self.nodes) == 1:
            return {self.nodes[0]: "no sum even by itself"}
        proven, bad = split_nodes(good, self._run_pairs)
        if bad:
            return {node: f"no sum beside {helper}, which comes through beside others" for node, helper in bad.items()}
        what = "every node comes through beside another" if proven else "no two nodes come through beside each other"
        silent = [node for node in self.nodes if node not in self.met]
        raise LaunchError(
            f"the all-reduce of {len(self.nodes)} nodes failed, but {what}, so none is known to be bad. Without an "
            f"answer were {', '.join(silent)}. {self._logs}"
        )

    def _run_pairs(self, pairs: Sequence[Pair]) -> set[Pair]:
        met = self._round(pairs)
        return {pair for pair in pairs if met.keys() >= set(pair)}

    @property
    def _logs(self) -> str:
        return f"Logs: {self._folder.path}/allreduce_*.log"

    def _round(self, groups: Sequence[Sequence[str]]) -> dict[str, NodeReport]:
        """Reports of the nodes that came through in their group.

        Raises:
            Preempted: `stop` turned true, so what they answered, or did not, says nothing of the nodes.
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
            name,
            [node for group in groups for node in group],
            [
                *(node_python(options), "-m", "slimrl.launch.allreduce", f"--plan={plan}"),
                *(f"--gpus={options.gpus_per_node}", f"--timeout-s={options.meeting_timeout_s}"),
            ],
            container=self._container,
            gpus=options.gpus_per_node,
            stop_together=False,
        )
        step.wait(options.meeting_timeout_s + START_S, self._stop)
        return read_reports(folder)

    def _group(self, nodes: Sequence[str], index: int) -> dict[str, Any]:
        # Nodes of one machine must not listen on one port; on machines of their own each may use any.
        ports: PortBlock = self._ports
        return {
            "nodes": list(nodes),
            "hosts": {node: self._allocation.hosts[node] for node in nodes},
            "port": ports.port("preflight") + index,
        }
