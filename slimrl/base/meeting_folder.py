"""Folders in which processes of one node meet, in place of torch's store behind a port, which obeys whoever reaches it.

Their maker removes them; what a killed one left, the next start does (slimrl/resync/ipc/stale_files.py).
"""

import os
import tempfile


def meeting_folder(name: str) -> tempfile.TemporaryDirectory[str]:
    """A new folder that only this user can enter; it is stale once this process is gone."""
    return tempfile.TemporaryDirectory(
        prefix=f"slimrl-{name}_",
        suffix=f"@{pid_namespace()}-{os.getpid()}-0",
        dir="/dev/shm",
        ignore_cleanup_errors=True,
    )


def pid_namespace() -> int:
    """Number of this process's pid namespace."""
    return os.stat("/proc/self/ns/pid").st_ino
