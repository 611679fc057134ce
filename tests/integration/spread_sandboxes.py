"""Runs programs in the sandboxes of a cluster's nodes and prints what became of them, as JSON.

python spread_sandboxes.py ADDRESS RAYLET_PID; the raylet is that of the second node, which dies on the way.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sandboxes import SMALL

from slimrl.agent.sandbox.interface import Program, Result
from slimrl.config.schema.agent import SandboxBackend, SandboxConfig
from slimrl.runtime.cluster.ray_cluster import ray_cluster
from slimrl.runtime.cluster.reservation import cluster_nodes
from slimrl.runtime.cluster.sandbox_nodes import NodeSandboxes

# Plain processes: a sandbox of its own for each of two nodes on one machine would show nothing more.
CONFIG = SandboxConfig(
    backend=SandboxBackend.subprocess,
    limits=replace(SMALL, wall_s=6.0),
    packages=[],
    max_running=2,
    max_waiting=2,
    wait_s=20.0,
)
PARENT = "import os; print(os.getppid())"
"""Says in which actor a program runs: a plain process is its child."""


async def main(address: str, raylet: int) -> dict[str, Any]:
    with ray_cluster(address, num_slots=0):
        sandboxes = NodeSandboxes(CONFIG, cluster_nodes(private=False)[0])
        try:
            return await said(sandboxes, raylet)
        finally:
            await sandboxes.close()


async def said(sandboxes: NodeSandboxes, raylet: int) -> dict[str, Any]:
    found: dict[str, Any] = {"parents": await outcomes(sandboxes, [PARENT] * 4)}
    found["refused"] = await outcomes(sandboxes, ["\0", "import time; time.sleep(60)"])
    found["many"] = await outcomes(sandboxes, ["import time; time.sleep(1)"] * 10)
    running = asyncio.create_task(outcomes(sandboxes, ["import time; time.sleep(4); print(1)"] * 2))
    await asyncio.sleep(0.5)
    os.kill(raylet, signal.SIGKILL)
    found["lost"] = await running
    found["later"] = await outcomes(sandboxes, [PARENT] * 4)
    return found


async def outcomes(sandboxes: NodeSandboxes, codes: Sequence[str]) -> list[str]:
    """Output and end of each program, or the exception's name; all are started at once."""

    async def run(code: str) -> Result:
        return await sandboxes.run(Program(code=code))

    results = await asyncio.gather(*map(run, codes), return_exceptions=True)
    return [
        type(result).__name__ if isinstance(result, BaseException) else f"{result.stdout.strip()} {result.ended.value}"
        for result in results
    ]


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1], int(sys.argv[2])))))
