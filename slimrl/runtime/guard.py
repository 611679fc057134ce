"""Ends what a private Ray cluster leaves when its driver was killed, so that nothing of the driver's own way out runs.

The driver starts it beside the cluster (`guarded`) and ends it after the cluster. Until then it only waits:

1. It holds a pidfd of the driver, which tells it of the driver's end, however that came.
2. Most processes end with the driver or with Ray's. Those that are left after GRACE_S, such as two agents of Ray's that
   try for a minute to report to the cluster that is gone, are killed by their pids.
3. The segments of shared memory that they held and the cluster's temporary folder are removed.

A process belongs to the cluster if its folder for temporary files, TMPDIR, is the cluster's, whose name has the
driver's pid, or if it has a file of the cluster's folder open to write: Ray's agents set titles of their own, which
overwrite their environment, and keep logs there. Both hold for processes whose parents have ended, too.
"""

import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

GRACE_S = 3.0
"""How long processes have to end by themselves once the driver is gone."""
END_TIMEOUT_S = 10.0
"""How long the kernel has to end a process: the killed ones, and the guard itself."""
POLL_S = 0.2


@contextmanager
def guarded(folder: Path, temporary_files: Path) -> Iterator[None]:
    """A guard over the processes that are started inside, until the way out.

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
    """Living processes of this user, except this one, that have that TMPDIR or write to a file below `folder`."""
    found = []
    # The kernel tells open files by paths without links, and the system's temporary folder may be behind one.
    real_folder = folder.resolve()
    for process in psutil.process_iter():
        try:
            belongs = process.environ().get("TMPDIR") == str(temporary_files) or _writes_below(process, real_folder)
            if belongs and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:  # It has ended meanwhile, or is another user's.
            continue
    return found


def _writes_below(process: psutil.Process, folder: Path) -> bool:
    return any(file.mode != "r" and Path(file.path).is_relative_to(folder) for file in process.open_files())


def end_what_is_left(folder: Path, temporary_files: Path) -> None:
    """Steps 2 and 3."""
    for process in _wait_for_end(folder, temporary_files, GRACE_S):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    _wait_for_end(folder, temporary_files, END_TIMEOUT_S)
    # Imports torch, for which a guard that never acts has no use.
    from slimrl.resync.shared_buffer import clean_stale_segments

    clean_stale_segments()
    shutil.rmtree(folder, ignore_errors=True)


def _wait_for_end(folder: Path, temporary_files: Path, timeout_s: float) -> list[psutil.Process]:
    """The members that are left when there are none, or when the time is over."""
    deadline = time.monotonic() + timeout_s
    while (left := members(folder, temporary_files)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return left


def main() -> None:
    driver, folder, temporary_files = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    try:
        poll = select.poll()
        poll.register(os.pidfd_open(driver), select.POLLIN)
        poll.poll()
    except ProcessLookupError:
        pass  # It ended before this process had started.
    end_what_is_left(folder, temporary_files)


if __name__ == "__main__":
    main()
