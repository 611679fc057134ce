"""What the tests of sandboxes begin with: whether this machine has namespaces, and a small sandbox."""

import functools
import shutil
import subprocess

import psutil
import pytest

from slimrl.agent.sandbox.bubblewrap import BubblewrapSandbox
from slimrl.config.schema.agent import SandboxLimits

SMALL = SandboxLimits(
    wall_s=1.5, cpu_s=1, memory_bytes=128 * 1024**2, processes=16, disk_bytes=16 * 1024**2, output_bytes=65536
)


@functools.cache
def without_namespaces() -> str | None:
    """Why bubblewrap cannot run here; None if it can."""
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed"
    command = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return None if done.returncode == 0 else f"namespaces are not allowed here: {done.stderr.strip()}"


needs_namespaces = pytest.mark.skipif(without_namespaces() is not None, reason=str(without_namespaces()))


def processes_inside(sandbox: BubblewrapSandbox) -> int:
    """How many processes a sandbox has besides bwrap: between runs 2, bwrap's first process and the interpreter."""
    assert sandbox.pid is not None
    return len(psutil.Process(sandbox.pid).children(recursive=True))
