"""What tests of benchmarks/chaos.py begin with: whether this machine lets a process have namespaces and disks."""

import functools
import subprocess
import sys
from pathlib import Path

NAMESPACES = Path(__file__).parents[2] / "benchmarks" / "chaos_namespaces.py"


@functools.cache
def what_is_missing() -> str | None:
    """As the function of the same name there says it."""
    program = "import chaos_namespaces as one; print(one.what_is_missing() or '')"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=NAMESPACES.parent, capture_output=True, text=True, timeout=90, check=True
    )
    return done.stdout.strip() or None
