"""What a fresh Python process computes, which says more than its time on a machine that does other things too."""

import subprocess
import sys
from subprocess import PIPE


def cpu_seconds(code: str) -> float:
    """CPU time of a Python process that runs `code`."""
    code += "import time; print(time.process_time())\n"
    done = subprocess.run([sys.executable, "-c", code], stdout=PIPE, check=True, timeout=60)
    return float(done.stdout.split()[-1])
