"""The limit of open files of this process, which counts the connections of its groups: one to each other member."""

import os
import resource

SPARE = 512
"""Files and connections of everything else that is opened later"""


def allow_connections(count: int) -> None:
    """Raise the soft limit where it would not suffice for so many connections beside what is open now.

    Raises:
        OSError: the hard limit does not suffice; it says what does.
    """
    needed = len(os.listdir("/proc/self/fd")) + count + SPARE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise OSError(
            f"resync.transport p2p needs {needed} open files in a trainer rank, the hard limit is {hard}. Raise it on "
            "each node (ulimit -Hn), before Ray starts."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
