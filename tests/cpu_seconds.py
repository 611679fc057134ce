"""What a fresh Python process computes, which says more than its time on a machine that does other things too."""

import os
import subprocess
import sys
from subprocess import PIPE


def cpu_seconds(code: str) -> float:
    """CPU time of a Python process that runs `code`, of modules that an earlier one has compiled."""
    code += "import time; print(time.process_time())\n"
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run([sys.executable, "-c", code], stdout=PIPE, check=True, timeout=60, env=env)
    return float(done.stdout.split()[-1])


def takes_less(code: str, share: float, of: str, *, rounds: int) -> bool:
    """Whether `code` takes less than `share` of the CPU time of `of`, by the least of up to `rounds` processes each.

    On a machine at work either may be slowed down alone.
    """
    least = least_of = float("inf")
    for _ in range(rounds):
        least, least_of = min(least, cpu_seconds(code)), min(least_of, cpu_seconds(of))
        if least < least_of * share:
            return True
    return False
