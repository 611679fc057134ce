"""A network of this process's own, in which nobody else of the machine can reach a port of its children.

A browser's DevTools port gives whoever connects all that the browser may do, and asks for no key.
"""

import fcntl
import os
import socket
import struct
from pathlib import Path

_SET_FLAGS = 0x8914
"""SIOCSIFFLAGS of netdevice(7)"""
_UP = 1


def leave_network() -> None:
    """Move this process, which has one thread, and the children that it will have to a network namespace with a
    loopback device alone.

    Raises:
        ValueError: the machine does not allow it.
    """
    user, group = os.geteuid(), os.getegid()
    try:
        if user == 0:
            os.unshare(os.CLONE_NEWNET)
        else:
            os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNET)
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
            Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh14x", b"lo", _UP))
    except OSError as error:
        raise ValueError(
            f"the browser needs a network namespace, so that no other user can reach it, and this machine allows none "
            f"({error}). Allow user namespaces, as the sandbox needs them too."
        ) from error
