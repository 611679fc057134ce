"""A user namespace with further users, which only root can make.

The kernel does not limit the processes of the host's root user, and limits pipes and descriptors on their way through
sockets for each user. So where slimrl is root, each run is another user of the host, which owns nothing. Elsewhere the
namespace that bwrap makes has the one user that slimrl runs as.
"""

import os
import select
import subprocess
from pathlib import Path

from slimrl.agent.sandbox.inside.confine import RUN_USERS
from slimrl.agent.sandbox.interface import SandboxError

FIRST_RUN_USER_ON_HOST = 64_000
"""First user id on the host of RUN_USERS: all of these are among the 65536 users that a rootless container has, and
above those that belong to people."""
START_S = END_S = 10.0
"""Seconds that `unshare` may take to make the namespace, and to end when it is killed"""


def open_user_namespace() -> int:
    """A descriptor of a new user namespace: user 0 is root, RUN_USERS follow one another from FIRST_RUN_USER_ON_HOST.

    Raises:
        SandboxError: the kernel does not allow it.
    """
    # `unshare` makes the namespace and then waits; it is only needed until the descriptor is open.
    command = ["unshare", "--user", "sh", "-c", "echo; read line"]
    try:
        holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    except OSError as error:
        raise SandboxError(f"cannot start unshare, install util-linux: {error}") from error
    try:
        assert holder.stdout is not None
        # `select.select` takes no descriptors from 1024 on.
        poll = select.poll()
        poll.register(holder.stdout, select.POLLIN)
        if not poll.poll(1000 * START_S):
            raise SandboxError(f"unshare made no user namespace within {START_S:g} s")
        if not holder.stdout.readline():
            raise SandboxError("the kernel does not allow a user namespace (docs/gateway.md#sandbox)")
        folder = Path(f"/proc/{holder.pid}")
        for name in ("gid_map", "uid_map"):
            (folder / name).write_text(f"0 0 1\n{RUN_USERS[0]} {FIRST_RUN_USER_ON_HOST} {len(RUN_USERS)}\n")
        return os.open(folder / "ns/user", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise SandboxError(f"cannot make a user namespace of several users: {error}") from error
    finally:
        holder.kill()
        holder.communicate(timeout=END_S)
