"""Settings of a sandbox. Times end in `_s` (seconds), sizes in `_bytes`."""

from dataclasses import dataclass, field
from enum import Enum


class Backend(str, Enum):
    bubblewrap = "bubblewrap"
    """Namespaces, seccomp and limits on this machine, forked from a warm interpreter."""
    subprocess = "subprocess"
    """A plain process with limits: no isolation."""
    remote = "remote"
    """A server with the HTTP interface of SandboxFusion."""
    container = "container"
    """docker or podman, a container for each run or session."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a run. docs/sandbox.md says how each backend enforces them."""

    wall_s: float = 8.0
    """Deadline of a run, or of one execution in a session. Below rollout.tool_timeout_s, so that a tool answers."""
    cpu_s: int = 8
    """CPU time of each process; whole seconds."""
    memory_bytes: int = 512 * 1024**2
    """Address space that a process may add to the warm interpreter's, and private memory of all processes together."""
    processes: int = 32
    """Processes and threads at the same time."""
    disk_bytes: int = 64 * 1024**2
    """/tmp and /dev/shm together, and the largest file."""
    output_bytes: int = 256 * 1024
    """stdout and stderr together."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise ValueError(f"{name}: {value} is not positive")


@dataclass(frozen=True, kw_only=True)
class SandboxConfig:
    """Which sandbox, and how much of it at a time."""

    backend: Backend = Backend.bubblewrap
    limits: Limits = field(default_factory=Limits)
    session_cpu_s: int = 60
    """CPU time of each process of a session, over the session's life: in place of limits.cpu_s."""
    max_running: int = 8
    """Runs at the same time; others wait."""
    max_waiting: int = 1024
    """Runs that wait; one more is refused."""
    wait_s: float = 60.0
    """How long a run waits before it is refused."""
    max_sessions: int = 64
    """Sessions that are open at the same time; others wait, as runs do."""
    packages: tuple[str, ...] = ("numpy", "sympy")
    """Distributions that the warm interpreter has imported, of bubblewrap: those of them that are installed."""
    url: str = "http://127.0.0.1:8080"
    """Of the remote server."""
    command: str = "docker"
    """Of the container backend: docker, podman or a path."""
    image: str = "python:3.12-slim"
    """Of the container backend; holds python3, sh, bash and, for sessions in a folder, tar."""
