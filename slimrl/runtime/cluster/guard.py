"""Cleans up a private Ray cluster whose driver was killed and could not clean up itself.

The driver starts the guard with the cluster (`guarded`) and ends it after the cluster. Until then the guard waits:

1. A pidfd of the driver tells it when the driver ends, however it ends.
2. Most processes end with the driver or with Ray. The guard kills those that are left after GRACE_S by pid, such as two
   agents of Ray that try for a minute to report to the dead cluster.
3. It removes their segments of shared memory and the cluster's temporary folder.

A process belongs to the cluster if its TMPDIR is the cluster's, whose name has the driver's pid, or if it has a file in
the cluster's folder open for writing: Ray's agents overwrite their environment with a process title, but log to that
folder. Both tests also find orphans.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from slimrl.base.lifeline import await_end_of
from slimrl.base.processes import lives, send_all

GRACE_S = 3.0
"""How long processes have to end by themselves once the driver is gone."""
END_TIMEOUT_S = 10.0
"""How long a killed process, or the guard itself, may take to be gone."""
POLL_S = 0.2


@contextmanager
def guarded(folder: Path, temporary_files: Path) -> Iterator[None]:
    """Run a guard over the processes that are started inside.

    Args:
        folder: the cluster's, removed if the driver is killed.
        temporary_files: TMPDIR of the cluster's processes, below `folder`.
    """
    command = [sys.executable, "-m", __name__, str(os.getpid()), str(folder), str(temporary_files)]
    # In a session of its own, which Ctrl-C in a terminal does not reach.
    nothing = subprocess.DEVNULL
    guard = subprocess.Popen(command, start_new_session=True, stdin=nothing, stdout=nothing, stderr=nothing)
    try:
        yield
    finally:
        guard.kill()
        guard.wait(END_TIMEOUT_S)


def members(folder: Path, temporary_files: Path) -> list[psutil.Process]:
    """Living processes of this user, except this one, with that TMPDIR or a file below `folder` open for writing."""
    found = []
    # The kernel tells open files by paths without links, and the system's temporary folder may be behind one.
    real_folder = folder.resolve()
    for process in psutil.process_iter():
        try:
            belongs = process.environ().get("TMPDIR") == str(temporary_files) or _writes_below(process, real_folder)
            if belongs and process.pid != os.getpid() and lives(process):
                found.append(process)
        except psutil.Error:  # It has ended, or belongs to another user.
            continue
    return found


def _writes_below(process: psutil.Process, folder: Path) -> bool:
    return any(file.mode != "r" and Path(file.path).is_relative_to(folder) for file in process.open_files())


def end_what_is_left(folder: Path, temporary_files: Path) -> None:
    """End the processes that are left and remove their files: steps 2 and 3."""
    end_members(folder, temporary_files, grace_s=GRACE_S)
    # Imports torch, for which a guard that never acts has no use.
    from slimrl.resync.ipc.stale_files import clean_stale_segments

    clean_stale_segments()
    shutil.rmtree(folder, ignore_errors=True)


def end_members(folder: Path, temporary_files: Path, *, grace_s: float) -> None:
    """Kill the members that have not ended by themselves after `grace_s`, and wait until they are gone."""
    send_all(_wait_for_end(folder, temporary_files, grace_s), signal.SIGKILL)
    _wait_for_end(folder, temporary_files, END_TIMEOUT_S)


def _wait_for_end(folder: Path, temporary_files: Path, timeout_s: float) -> list[psutil.Process]:
    """Wait until no member is left; returns those that are left after the deadline."""
    deadline = time.monotonic() + timeout_s
    while (left := members(folder, temporary_files)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return left


def main() -> None:
    driver, folder, temporary_files = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    with suppress(ProcessLookupError):  # The driver may have ended before the guard started.
        await_end_of(os.pidfd_open(driver))
    end_what_is_left(folder, temporary_files)


if __name__ == "__main__":
    main()
