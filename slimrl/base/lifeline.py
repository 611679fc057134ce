"""Ends a process when its parent has ended, in whatever way.

The kernel's own parent-death signal fires when the *thread* that started the child ends, which would end
servers that a worker thread started. So the child holds a pidfd of its parent and waits on it in a daemon thread. All
processes of a server are in its process group, and the whole group is killed.
"""

import os
import select
import signal
import sys
import threading


def end_with(parent_pid: int) -> None:
    """Do `end_group_with` of the process `parent_pid`.

    Raises:
        SystemExit: the parent has ended already.
    """
    try:
        parent = os.pidfd_open(parent_pid)
    except ProcessLookupError:
        sys.exit(f"the process {parent_pid} that started this one has ended")
    end_group_with(parent)


def end_group_with(parent: int) -> None:
    """Kill this process's group as soon as the process of a pidfd has ended.

    The caller must lead its own process group (a new session), because the whole group is killed.
    """

    def watch() -> None:
        await_end_of(parent)
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def await_end_of(process: int) -> None:
    """Wait until the process of a pidfd has ended, however long it lives."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    poll.poll()
