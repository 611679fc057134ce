"""A network, mounts, processes and shared memory of its own for a command, all of which end with it."""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress

import psutil

PROGRAMS = ("unshare", "setpriv", "ip", "mount", "umount", "losetup", "mkfs.ext4", "fsfreeze", "nft", "cc")
"""What the faults and their isolation are made with"""
PRIVATE = "SLIMRL_CHAOS_PRIVATE"
"""Set in the process that has namespaces of its own"""
NAMESPACES = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
SETUP = 'ip link set lo up && mount -t tmpfs -o size=8g none /dev/shm && "$@"; exit $?'
"""The shell stays: as the first process of its namespace it takes the exit codes of orphans."""
PROBE = ("sh", "-c", "losetup -f && nft add table inet chaos")


def what_is_missing() -> str | None:
    """Why this machine does not let a process have them, with loop devices and nftables; None if it does."""
    if os.geteuid() != 0:
        return "it needs root, to mount a disk, drop packets and have shared memory of its own"
    if absent := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"it needs {', '.join(absent)}, not found here"
    done = subprocess.run(inside(*PROBE), capture_output=True, text=True, timeout=60, check=False)
    return f"it may not have namespaces and disks here: {done.stderr.strip()}" if done.returncode else None


def inside(*command: str) -> list[str]:
    """The same command with all that of its own; its processes are killed where whoever starts it ends."""
    return ["setpriv", "--pdeathsig", "KILL", *NAMESPACES, "sh", "-c", SETUP, "sh", *command]


def run_inside() -> int:
    """Run this very command with all that of its own, with PRIVATE set; SIGTERM is passed on to it.

    Returns:
        Its exit code, 1 if a signal ended it.
    """
    command = [sys.executable, *sys.argv]
    process = subprocess.Popen(inside(*command), env={**os.environ, PRIVATE: "1"})

    def pass_on(*_: object) -> None:
        for one in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if one.cmdline() == command:
                    one.terminate()
                    return
        # It has not begun.
        process.kill()

    signal.signal(signal.SIGTERM, pass_on)
    # The command gets a terminal's too, and ends by it.
    signal.signal(signal.SIGINT, lambda *_: None)
    code = process.wait()
    return code if code >= 0 else 1
