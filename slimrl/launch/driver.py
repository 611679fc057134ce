"""`python -m slimrl.launch.driver`: waits for all nodes of the Ray cluster, then runs the command that uses it.

The job's word `preempt` becomes SIGUSR1 to that command alone. It answers with exit code 75 when its checkpoint is
whole; one that had not yet begun to listen has nothing to save, and counts as answered too.
"""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

from slimrl.launch.control import END, PREEMPT, run_under_control
from slimrl.launch.ray_node import cluster_environment
from slimrl.launch.slurm import PREEMPTED

JOIN_TIMEOUT_S = 300.0
"""How long the nodes may take to join the cluster."""


def main() -> None:
    """Exit code: that of the command; 1 where nodes do not join."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--control", type=Path, required=True)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    plan = json.loads(arguments.plan.read_text())
    address = plan["ray_address"]
    environment = cluster_environment(plan)
    # Ray reads it when it is imported.
    os.environ.update(environment)
    await_nodes(address, len(plan["nodes"]), arguments.control)
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    code = run_under_control(command, arguments.control, {**environment, "SLIMRL_RAY_ADDRESS": address})
    sys.exit(PREEMPTED if code == -signal.SIGUSR1 else code if code >= 0 else 128 - code)


def await_nodes(address: str, count: int, control: Path) -> None:
    """Returns when `count` nodes are in the cluster at `address`.

    Raises:
        TimeoutError: they are not, within JOIN_TIMEOUT_S.
        SystemExit: the job ends or is preempted meanwhile.
    """
    import ray

    deadline = time.monotonic() + JOIN_TIMEOUT_S
    connected = False
    found = 0
    try:
        while found < count:
            word = control.read_text().strip()
            if word in (END, PREEMPT):
                sys.exit(PREEMPTED if word == PREEMPT else 1)
            if time.monotonic() > deadline:
                raise TimeoutError(f"{found} of {count} nodes are in the Ray cluster at {address} "
                                   f"after {JOIN_TIMEOUT_S:.0f} s")  # fmt: skip
            if not connected:
                connected = _connects(address)
            found = sum(node["Alive"] for node in ray.nodes()) if connected else 0
            time.sleep(0.5)
    finally:
        ray.shutdown()


def _connects(address: str) -> bool:
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (RuntimeError, ConnectionError, ValueError) as error:
        print(f"not yet: {error}", file=sys.stderr)
        return False
    return True


if __name__ == "__main__":
    main()
