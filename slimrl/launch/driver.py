"""`python -m slimrl.launch.driver`: waits for all nodes of the Ray cluster, then runs the job's command on it.

When the job asks for a checkpoint (`preempt`), only that command gets SIGUSR1. It saves and exits with code 75. A
command that SIGUSR1 ends, because it has no handler for it yet, has nothing to save and counts as preempted too.
"""

import argparse
import json
import signal
import sys
from pathlib import Path

from slimrl.launch.control import run_under_control
from slimrl.launch.ray_node import cluster_environment
from slimrl.launch.slurm import PREEMPTED


def main() -> None:
    """Exit code: the command's; 1 if nodes do not join."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--control", type=Path, required=True)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    plan = json.loads(arguments.plan.read_text())
    address = plan["ray_address"]
    environment = {**cluster_environment(plan), "SLIMRL_RAY_ADDRESS": address}
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    wait_for_nodes = [sys.executable, "-m", "slimrl.launch.wait_for_nodes", address, str(len(plan["nodes"]))]
    for part in (wait_for_nodes, command):
        code = run_under_control(part, arguments.control, environment, preemptible=True)
        if code:
            break
    sys.exit(PREEMPTED if code == -signal.SIGUSR1 else code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
