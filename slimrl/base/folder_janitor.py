"""Removes a folder once the process that owns it has ended, in whatever way; for folders in memory."""

import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

START_S = 60.0
"""Deadline of a janitor's start"""
LOOK_S = 1.0
"""Seconds between two looks whether the folder is still there; without it the janitor ends."""
REMOVE_S = 60.0
"""How long other processes may go on writing into the folder after its owner has ended."""


def watch_over(folder: Path) -> None:
    """Have a janitor remove the folder when this process ends. It ends itself when the folder is gone."""
    command = [sys.executable, "-m", __name__, str(os.getpid()), str(folder)]
    null = subprocess.DEVNULL
    # It forks, and so is no child of this process, whose children Ray may kill with it.
    subprocess.run(command, stdin=null, stdout=null, stderr=null, start_new_session=True, check=True, timeout=START_S)


def main() -> None:
    owner, folder = int(sys.argv[1]), Path(sys.argv[2])
    pidfd = os.pidfd_open(owner)
    if os.fork():
        os._exit(0)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    while folder.is_dir() and not poll.poll(1000 * LOOK_S):
        pass
    deadline = time.monotonic() + REMOVE_S
    while folder.is_dir() and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(LOOK_S)


if __name__ == "__main__":
    main()
