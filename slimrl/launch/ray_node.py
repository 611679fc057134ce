"""`python -m slimrl.launch.ray_node`: this node's part of a job's Ray cluster, until the job says that it ends.

Started once on every node that the job uses; the plan says which is the head. The address is always the plan's, the
temporary folder is this job's alone and goes when it ends, the ports are the job's block.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from slimrl.launch.control import run_under_control
from slimrl.launch.ports import PortBlock
from slimrl.launch.preflight import interface_environment, node_name

TEMP = "/tmp"
"""On the node's own disk whatever TMPDIR says, and with a short path: sockets have at most 107 bytes."""

HEAD_TIMEOUT_S = 180.0
"""How long other nodes wait for the head to listen."""


def main() -> None:
    """Run Ray on this node; the exit code is 0 where the job ended it, and never where Ray ended by itself."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--control", type=Path, required=True)
    arguments = parser.parse_args()
    plan = json.loads(arguments.plan.read_text())
    node = node_name()
    # Until the control takes it over: an end that leaves no folder.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    temp_dir = make_temp_dir(plan["job_id"])
    try:
        if plan["nodes"][node]["rank"]:
            _await_head(plan["head_address"], PortBlock(plan["first_port"]).port("gcs"))
        command, environment = ray_command(plan, node, temp_dir), ray_environment(plan, node, temp_dir)
        code = run_under_control(command, arguments.control, environment, preemptible=False)
    finally:
        shutil.rmtree(temp_dir, ignore_errors=True)
    # `ray start --block` has no reason to end before it is told to.
    print(f"{node}: Ray's processes have ended with {code}" if code else f"{node}: ended", file=sys.stderr)
    sys.exit(1 if code else 0)


def make_temp_dir(job_id: int) -> Path:
    """A new folder of this node for Ray, with `tmp` for its actors.

    Ray puts sockets at `session_<date>_<time>_<pid>/sockets/plasma_store` below it, 64 bytes at most, so it has no
    more in its name than the job: nodes may have long names.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"slimrl-ray-{job_id}-", dir=TEMP))
    (folder / "tmp").mkdir()
    return folder


def ray_command(plan: dict[str, Any], node: str, temp_dir: Path) -> list[str]:
    """`ray start` of this node."""
    own = plan["nodes"][node]
    ports = PortBlock(own["first_port"])
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"),
        f"--node-ip-address={own['address']}",
        f"--node-name={node}",
        f"--temp-dir={temp_dir}",
        f"--node-manager-port={ports.port('node_manager')}",
        f"--object-manager-port={ports.port('object_manager')}",
        f"--ray-client-server-port={ports.port('client_server')}",
        f"--dashboard-agent-listen-port={ports.port('agent_listen')}",
        f"--dashboard-agent-grpc-port={ports.port('agent_grpc')}",
        f"--runtime-env-agent-port={ports.port('runtime_env_agent')}",
        f"--metrics-export-port={ports.port('metrics_export')}",
        f"--min-worker-port={ports.first_worker}",
        f"--max-worker-port={ports.last}",
        f"--num-cpus={own['cores']}",
        f"--num-gpus={plan['gpus']}",
        f"--object-store-memory={plan['object_store_bytes']}",
    ]
    if own["rank"] == 0:
        return [*command, "--head", f"--port={ports.port('gcs')}", "--include-dashboard=false"]
    return [*command, f"--address={plan['ray_address']}"]


def ray_environment(plan: dict[str, Any], node: str, temp_dir: Path) -> dict[str, str]:
    """Of Ray and so of all actors on this node."""
    return {
        **cluster_environment(plan),
        "TMPDIR": str(temp_dir / "tmp"),
        # A node that is told to end hands its work over for up to 30 s; here the job has ended, and the head with it.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        **interface_environment(plan["nodes"][node]["interface"]),
    }


def cluster_environment(plan: dict[str, Any]) -> dict[str, str]:
    """Of everything that joins the cluster: no other address than the plan's, and the job's own token.

    Who reaches Ray's ports can run programs as this user, so they are not open to others on the network.
    """
    return {
        **{name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RAY_AUTH_TOKEN")},
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": plan["token_file"],
    }


def _await_head(address: str, port: int) -> None:
    deadline = time.monotonic() + HEAD_TIMEOUT_S
    while True:
        try:
            with socket.create_connection((address, port), timeout=5.0):
                return
        except OSError as error:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no Ray head at {address}:{port} within {HEAD_TIMEOUT_S:.0f} s: {error}") from error
        time.sleep(1.0)


if __name__ == "__main__":
    main()
