"""The command line of bwrap, in which the warm interpreter runs.

It is root of a user namespace of its own, with the few capabilities that it needs to confine its forks and to watch
them; it runs no untrusted code itself. The root file system is read-only, with what visible.py shows; there is no
network.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from slimrl.agent.sandbox import visible
from slimrl.agent.sandbox.inside.confine import EMPTY
from slimrl.agent.sandbox.inside.files import BASE

_INSIDE = Path(__file__).with_name("inside")
_PROGRAM = "; ".join(
    (
        f"import sys; sys.path[:0] = ['/sandbox', '{visible.PACKAGES}']",
        "from slimrl.agent.sandbox.inside.zygote import main",
        "main()",
    )
)
_ENVIRONMENT = {
    "PATH": f"{visible.VENV}/bin:/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "OPENBLAS_NUM_THREADS": "1",  # a fork has no other thread
    "OMP_NUM_THREADS": "1",
}
_DEVICES = {"null": "null", "zero": "full", "full": "full", "random": "random", "urandom": "urandom"}
"""Device within -> device of the host. Both of zero and full read as zeros, and a shared mapping of zero is memory that
is nobody's."""
_NAMESPACES = ("pid", "net", "ipc", "uts", "cgroup-try")


def bwrap_command(
    control: int,
    namespace: int | None,
    packages: Sequence[str],
    installed: list[str],
    folders: Path,
    files: Mapping[str, int],
) -> list[str]:
    """Start the warm interpreter.

    Args:
        control: descriptor of the control socket.
        namespace: descriptor of a user namespace of several users; None for a new one of one user.
        packages: what it imports, if it is installed.
        installed: those that are, with what they need.
        folders: with those over which sessions work.
        files: path within the virtual environment -> descriptor of its content.
    """
    command = ["bwrap", "--die-with-parent", "--new-session"]
    command += ["--unshare-user"] if namespace is None else ["--userns", str(namespace)]
    command += [f"--unshare-{kind}" for kind in _NAMESPACES]
    command += ["--hostname", "sandbox", "--cap-drop", "ALL"]
    for capability in (
        "SYS_ADMIN",
        "SYS_PTRACE",
        "SYS_NICE",
        "DAC_READ_SEARCH",
        "KILL",
        "SYS_CHROOT",
        # As root of several users it lets each of them change what an overlay shows.
        *(() if namespace is None else ("SETUID", "SETGID", "CHOWN", "DAC_OVERRIDE", "FOWNER")),
    ):
        command += ["--cap-add", f"CAP_{capability}"]
    command += ["--clearenv", *(word for pair in _ENVIRONMENT.items() for word in ("--setenv", *pair))]
    command += [*visible.arguments(installed), "--proc", "/proc", "--tmpfs", "/dev", "--dir", "/dev/shm"]
    for device, source in _DEVICES.items():
        command += ["--dev-bind", f"/dev/{source}", f"/dev/{device}"]
    command += ["--symlink", "/proc/self/fd", "/dev/fd", "--remount-ro", "/dev", "--dir", "/tmp"]
    command += ["--dir", EMPTY, "--ro-bind", str(folders), BASE]
    for path, file in files.items():
        command += ["--perms", "0755", "--file", str(file), f"{visible.VENV}/{path}"]
    for path, target in visible.environment_links().items():
        for folder in reversed(PurePosixPath(path).parents):
            command += ["--dir", f"{visible.VENV}/{folder}"]  # else nobody but root could read it
        command += ["--symlink", target, f"{visible.VENV}/{path}"]
    command += [
        "--dir",
        "/sandbox",
        "--ro-bind",
        str(_INSIDE),
        "/sandbox/slimrl/agent/sandbox/inside",
        "--remount-ro",
        "/",
        "--chdir",
        "/",
    ]
    command += [str(visible.interpreter()), "-I", "-S", "-X", "utf8", "-c", _PROGRAM]
    return [*command, str(control), *(name for name in installed if name in packages)]
