"""bubblewrap around an agent's command: docs/gateway.md says what it keeps apart, and what it does not.

Without the host's network the command has a network namespace of its own, in which the gateway is all that listens:
the program BOOT opens a socket there at the gateway's port and hands it out of the sandbox to the gateway, which
accepts from it. Then it becomes the command.
"""

import asyncio
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from slimrl.agent.gateway.workspace import Workspace
from slimrl.agent.sandbox import visible
from slimrl.config.schema.agent import CommandSandboxConfig

INSIDE = Workspace(root=Path("/workspace"))
"""The workspace as the command sees it, with a /tmp next to it: the same for all trajectories"""
LOOPBACK = "127.0.0.1"
SHARED_BYTES = 64 * 1024**2
"""Size of the sandbox's /dev/shm, which is the host's memory"""
USER = 1000
"""User id of the command within the sandbox: agents refuse to work for root."""
_ETC = ("ssl/certs", "ssl/openssl.cnf", "pki/tls/certs", "pki/ca-trust", "ca-certificates", "localtime", "mime.types")
_ETC_OF_NETWORK = ("resolv.conf", "nsswitch.conf")
_OWN_ETC = {
    "passwd": f"agent:x:{USER}:{USER}:agent:{INSIDE.home}:/bin/sh\n",
    "group": f"agent:x:{USER}:\n",
    "hosts": f"{LOOPBACK} localhost sandbox\n",
}
BOOT = """
import os, socket, sys
control, port, *words = sys.argv[1:]
listening = socket.create_server(("127.0.0.1", int(port)), backlog=128)
with socket.socket(fileno=int(control)) as outside:
    socket.send_fds(outside, [b"."], [listening.fileno()])
listening.close()
try:
    os.execvp(words[0], words)
except OSError as error:
    sys.exit(f"{words[0]} cannot be started in the sandbox: {error}")
"""


def sandboxed(
    words: Sequence[str], place: Workspace, config: CommandSandboxConfig, boot: tuple[int, int] | None
) -> list[str]:
    """The command line that runs a command in a sandbox. Raises OSError.

    Args:
        boot: descriptor of the socket to the gateway and the gateway's port; None to share the host's network.
    """
    etc = place.root / "etc"
    etc.mkdir()
    for name, content in _OWN_ETC.items():
        (etc / name).write_text(content)
    spaces = ["user", "pid", "ipc", "uts", "cgroup-try", *(["net"] if boot else [])]
    line = ["bwrap", "--die-with-parent", "--new-session", *(f"--unshare-{kind}" for kind in spaces)]
    line += ["--disable-userns", "--cap-drop", "ALL", "--uid", str(USER), "--gid", str(USER), "--hostname", "sandbox"]
    line += [*visible.arguments([]), "--proc", "/proc", "--dev", "/dev"]
    line += ["--size", str(SHARED_BYTES), "--tmpfs", "/dev/shm"]
    for name in (*_ETC, *(() if boot else _ETC_OF_NETWORK)):
        line += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    for name in _OWN_ETC:
        line += ["--ro-bind", str(etc / name), f"/etc/{name}"]
    line += ["--bind", str(place.tmp), "/tmp"]
    for folder in (INSIDE.work, INSIDE.home, INSIDE.tmp):
        line += ["--bind", str(place.root / folder.name), str(folder)]
    given = [word for word in words[1:] if os.path.isfile(word) and not _is_shown(os.path.abspath(word), config.paths)]
    for path in map(os.path.abspath, [*config.paths, *given]):
        line += ["--ro-bind", path, path]
    line += ["--remount-ro", "/", "--chdir", str(INSIDE.work), "--"]
    if boot is None:
        return [*line, *words]
    return [*line, str(visible.interpreter()), "-I", "-S", "-c", BOOT, *map(str, boot), *words]


async def handed_socket(control: socket.socket) -> socket.socket | None:
    """The socket that a sandbox's boot hands out; None if it ends before that.

    Args:
        control: our end, which does not block.
    """
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(control, readable.set)
    try:
        await readable.wait()  # as long as the trajectory may last
    finally:
        loop.remove_reader(control)
    _, files, _, _ = socket.recv_fds(control, 1, 1)
    return socket.socket(fileno=files[0]) if files else None


def hidden_program(program: str, paths: Sequence[str]) -> str | None:
    """The path of a program or where it leads to, whichever the sandbox does not show; None if it shows both.

    Args:
        program: a path, absolute or of the present folder.
    """
    ways = (os.path.abspath(program), os.path.realpath(program))
    return next((path for path in ways if not _is_shown(path, paths)), None)


def _is_shown(path: str, paths: Sequence[str]) -> bool:
    shown = ["/usr", "/bin", "/sbin", os.path.realpath(sys.base_prefix), *map(os.path.abspath, paths)]
    return any(Path(path).is_relative_to(one) for one in shown)
