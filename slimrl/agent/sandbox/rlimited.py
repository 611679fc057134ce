"""A sandbox that isolates nothing: plain processes with resource limits, in an empty folder.

For machines without namespaces, and code that is trusted. A program sees and may change all that slimrl's user may,
and processes that it detaches from its group stay.
"""

import logging
import sys
import tempfile
from pathlib import Path

from slimrl.agent.sandbox.interface import Language, Program, Result, SandboxError, Session
from slimrl.agent.sandbox.process import Command, run_command
from slimrl.config.schema.agent import SandboxConfig, SandboxLimits

logger = logging.getLogger(__name__)
WARNING = (
    "The subprocess sandbox isolates nothing: code that the policy writes runs as this user, with its files, its "
    "network and its rewards. Use the bubblewrap backend (docs/gateway.md#sandbox)."
)


class SubprocessSandbox:
    """Sandbox of plain processes with resource limits; warns once, when it is made, that it is no isolation."""

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        logger.warning(WARNING)

    async def run(self, program: Program, limits: SandboxLimits | None = None) -> Result:
        limits = limits or self._config.limits
        interpreter = {Language.python: [sys.executable, "-I", "-c"], Language.shell: ["bash", "-c"]}[program.language]
        with tempfile.TemporaryDirectory(prefix="slimrl-sandbox-", ignore_cleanup_errors=True) as folder:
            environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"}
            argv = [*_limited(limits), *interpreter, program.code]
            return await run_command(Command(argv=argv, stdin=program.stdin, env=environment, cwd=Path(folder)), limits)

    async def session(
        self, language: Language = Language.python, *, folder: Path | None = None, limits: SandboxLimits | None = None
    ) -> Session:
        raise SandboxError("the subprocess sandbox has no sessions; use bubblewrap or container")

    async def close(self) -> None:
        """Do nothing: no process is left between runs."""


def _limited(limits: SandboxLimits) -> list[str]:
    """The prlimit command in front of a program. It sets no limit of processes: the kernel would count all those of the
    user."""
    return [
        "prlimit",
        f"--cpu={limits.cpu_s}",
        f"--as={limits.memory_bytes}",
        f"--fsize={limits.disk_bytes}",
        "--core=0",
        "--",
    ]
