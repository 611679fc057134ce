"""`python -m slimrl.launch.driver`: waits for all nodes of the Ray cluster, then runs the command that uses it.

The job's word `preempt` becomes SIGUSR1 to that command alone. It answers with exit code 75 when what it
has is saved; one that had not yet begun to listen has nothing to save, and counts as answered too.
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
    """Exit code: that of the command; 1 where nodes do not join."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--control", type=Path, required=True)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    plan = json.loads(arguments.plan.read_text())
    address = plan["ray_address"]
    environment = {**cluster_environment(plan), "SLIMRL_RAY_ADDRESS": address}
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    joined = [sys.executable, "-m", "slimrl.launch.joined", address, str(len(plan["nodes"]))]
    for part in (joined, command):
        code = run_under_control(part, arguments.control, environment, preemptible=True)
        if code:
            break
    sys.exit(PREEMPTED if code == -signal.SIGUSR1 else code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
