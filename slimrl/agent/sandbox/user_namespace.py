"""A user namespace with a second user, which only root can make.

The kernel does not limit the processes of the host's root user. So where slimrl is root, runs are another user of the
host, which owns nothing. Elsewhere the namespace that bwrap makes has the one user that slimrl runs as.
"""

import os
import subprocess
from pathlib import Path

from slimrl.agent.sandbox.interface import SandboxError

RUN_USER_ON_HOST = 64_000
"""Among the 65536 users that a rootless container has, and above those that belong to people."""
END_S = 10.0


def open_user_namespace() -> int:
    """A descriptor of a new user namespace: user 0 is root, user 1 is RUN_USER_ON_HOST.

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
        if not holder.stdout.readline():
            raise SandboxError("the kernel does not allow a user namespace (docs/sandbox.md)")
        folder = Path(f"/proc/{holder.pid}")
        for name in ("gid_map", "uid_map"):
            (folder / name).write_text(f"0 0 1\n1 {RUN_USER_ON_HOST} 1\n")
        return os.open(folder / "ns/user", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise SandboxError(f"cannot make a user namespace of two users: {error}") from error
    finally:
        holder.kill()
        holder.communicate(timeout=END_S)
