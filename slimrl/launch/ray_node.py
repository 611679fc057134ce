"""`python -m slimrl.launch.ray_node`: runs Ray on one node of a job, until the job says `end`.

It runs once on every node that the job uses; the plan says which node is the head, and gives address and ports. Ray's
temporary folder belongs to this job alone and is removed at the end.
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
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from slimrl.launch.control import run_under_control
from slimrl.launch.ports import PortBlock
from slimrl.launch.preflight import interface_environment, node_name

TEMP = "/tmp"
"""Folder on the node's own disk, whatever TMPDIR says, and short: the path of a socket has at most 107 bytes."""

HEAD_TIMEOUT_S = 180.0
"""How long other nodes wait for the head to listen."""

START_ATTEMPTS = 3
RAY_GIVES_UP_S = 30.0
"""How long `ray start` itself, which has no option for it, waits for its node before it ends as failed."""

END_TIMEOUT_S = 5.0
"""Seconds from SIGTERM to SIGKILL: Ray has nothing to save then, but a node whose head has gone first waits for it."""

STARTED = "ray_current_cluster"
"""File that `ray start` writes into its temporary folder when the node has joined."""


def main() -> None:
    """Exit code 0 if the job ended Ray, 1 if Ray ended by itself."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--control", type=Path, required=True)
    arguments = parser.parse_args()
    plan = json.loads(arguments.plan.read_text())
    node = node_name()
    # Remove the folder even if SIGTERM comes before run_under_control sets its own handler.
    _exit_on_signals()
    temp_dir = make_temp_dir(plan["job_id"])
    try:
        os.environ.update(kernel_caches(Path(temp_dir), os.environ))
        code = _run_ray(plan, node, temp_dir, arguments.control)
    finally:
        shutil.rmtree(temp_dir, ignore_errors=True)
    # `ray start --block` should not end before it is told to: by the job, or by SLURM, which ends a requeued one.
    ended = {0: "ended", -signal.SIGTERM: "ended by SIGTERM"}
    print(f"{node}: {ended.get(code, f"Ray's processes have ended with {code}")}", file=sys.stderr)
    sys.exit(1 if code else 0)


KERNEL_CACHES = {
    "XDG_CACHE_HOME": "",
    "SGLANG_CACHE_DIR": "sglang",
    "DG_JIT_CACHE_DIR": "deep_gemm",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TILELANG_CACHE_DIR": "tilelang",
    "CUDA_CACHE_PATH": "nv",
}
"""Variables that say where compiled kernels are kept, else below the home folder -> folder of its own."""


def kernel_caches(folder: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables for Ray's processes that put compiled kernels into a folder, where the home folder cannot take them.

    It cannot in a container of pyxis, which is read-only and without the user's home. What is set already stays.
    """
    if os.access(Path.home(), os.W_OK):
        return {}
    kept = folder / "kernels"
    return {name: str(kept / below) for name, below in KERNEL_CACHES.items() if name not in environment}


def _exit_on_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: sys.exit(1))


def _run_ray(plan: dict[str, Any], node: str, temp_dir: Path, control: Path) -> int:
    """Run Ray until it ends, again if it was only too slow to start; returns its exit code, 0 if the job ended it."""
    command, environment = ray_command(plan, node, temp_dir), ray_environment(plan, node, temp_dir)
    for attempt in range(1, START_ATTEMPTS + 1):
        if plan["nodes"][node]["rank"]:
            _await_head(plan["ray_address"])
        began = time.monotonic()
        code = run_under_control(command, control, environment, preemptible=False, end_timeout_s=END_TIMEOUT_S)
        gave_up = code == 1 and time.monotonic() - began > RAY_GIVES_UP_S and not (temp_dir / "ray" / STARTED).exists()
        if not gave_up or attempt == START_ATTEMPTS:
            break
        _exit_on_signals()
        print(f"{node}: Ray gave up on its own start, attempt {attempt} of {START_ATTEMPTS}", file=sys.stderr)
    return code


def make_temp_dir(job_id: int) -> Path:
    """A new folder of this user alone, with `ray` for Ray, which lets everybody write there, and `tmp` for its actors.

    Ray puts sockets at `session_<date>_<time>_<pid>/sockets/plasma_store` below it, up to 64 bytes. So the folder's
    name has only the job's id: a node's name may be long.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"slimrl-ray-{job_id}-", dir=TEMP))
    (folder / "tmp").mkdir()
    (folder / "ray").mkdir()
    return folder


def ray_command(plan: dict[str, Any], node: str, temp_dir: Path) -> list[str]:
    own = plan["nodes"][node]
    ports = PortBlock(own["first_port"])
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"),
        f"--node-ip-address={own['address']}",
        f"--node-name={node}",
        f"--temp-dir={temp_dir / 'ray'}",
        f"--node-manager-port={ports.port('node_manager')}",
        f"--object-manager-port={ports.port('object_manager')}",
        *client_server_option(ports.port("client_server")),
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


def client_server_option(port: int) -> list[str]:
    """Option for the port of Ray's client server, which slimrl does not use but Ray starts, by default on one port for
    all jobs.

    Without grpc, which not every installation has, Ray has no such server and refuses the option.
    """
    return [f"--ray-client-server-port={port}"] if find_spec("grpc") else []


def ray_environment(plan: dict[str, Any], node: str, temp_dir: Path) -> dict[str, str]:
    """Environment of Ray and so of all actors on this node."""
    return {
        **cluster_environment(plan),
        "TMPDIR": str(temp_dir / "tmp"),
        # A node that is told to end hands its work over for up to 30 s; here the job has ended, and the head with it.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        **interface_environment(plan["nodes"][node]["interface"]),
    }


def cluster_environment(plan: dict[str, Any]) -> dict[str, str]:
    """Environment of everything that joins the cluster: only the plan's address, and the job's own token.

    Whoever can talk to Ray's ports can run programs as this user; the token keeps others on the network out.
    """
    return {
        **{name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RAY_AUTH_TOKEN")},
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": plan["token_file"],
    }


def _await_head(address: str) -> None:
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + HEAD_TIMEOUT_S
    while True:
        try:
            with socket.create_connection((host, int(port)), timeout=5.0):
                return
        except OSError as error:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no Ray head at {address} within {HEAD_TIMEOUT_S:.0f} s: {error}") from error
        time.sleep(1.0)


if __name__ == "__main__":
    main()
