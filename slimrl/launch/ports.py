"""The TCP ports of a job's Ray cluster: one block, derived from the job's id.

Blocks lie below the ports that slimrl's servers search (15000 to 32000, slimrl/engines/servers/ports.py) and below the
kernel's ephemeral range, so that no connection of another process occupies a port that Ray is about to listen on. Jobs
with consecutive ids have different blocks; so have nodes of one job that share an address.
"""

from __future__ import annotations

from dataclasses import dataclass

from slimrl.launch.reports import LaunchError

FIRST_PORT = 10_000
BLOCK_PORTS = 500
"""Ports of a block: the named ones below, the rest for Ray's worker processes, one per core at most."""
NUM_BLOCKS = 10

NAMED = (
    "gcs",
    "node_manager",
    "object_manager",
    "client_server",
    "agent_listen",
    "agent_grpc",
    "runtime_env_agent",
    "metrics_export",
    "preflight",
)
"""Uses of the first ports of a block, in order."""


@dataclass(frozen=True)
class PortBlock:
    """A block of ports, `first` to `last`, both included."""

    first: int

    @property
    def last(self) -> int:
        return self.first + BLOCK_PORTS - 1

    @property
    def first_worker(self) -> int:
        """First port of the worker processes, whose ports end at `last`."""
        return self.first + len(NAMED)

    def port(self, name: str) -> int:
        return self.first + NAMED.index(name)


def port_block(job_id: int, lane: int = 0) -> PortBlock:
    """The block of a job's ports.

    Args:
        lane: 0, 1, ... for nodes of the job that share one address.

    Raises:
        LaunchError: more nodes share an address than there are blocks.
    """
    if lane >= NUM_BLOCKS:
        raise LaunchError(f"{lane + 1} nodes of the job have one address; there are ports for {NUM_BLOCKS}.")
    return PortBlock(FIRST_PORT + BLOCK_PORTS * ((job_id + lane) % NUM_BLOCKS))
