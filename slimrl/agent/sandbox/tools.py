"""Tools that run code in the sandbox: `agent.tools: ["slimrl.agent.sandbox.tools:python"]`."""

import asyncio

from slimrl.agent.sandbox.config import SandboxConfig
from slimrl.agent.sandbox.interface import Ended, Program, Result
from slimrl.agent.sandbox.pool import SandboxPool

NUM_ERROR_LINES = 8
"""Of stderr, from its end."""
_REASONS = {
    Ended.timeout: "stopped: out of time",
    Ended.memory: "stopped: out of memory",
    Ended.output: "stopped: too much output",
    Ended.killed: "the program crashed",
}


class _Shared:
    """The pool of this process, which is used within one event loop."""

    def __init__(self) -> None:
        self.config = SandboxConfig()
        self._pool: SandboxPool | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def pool(self) -> SandboxPool:
        """The pool of the running loop. That of a loop that has ended is left: its sandbox ended with its socket."""
        loop = asyncio.get_running_loop()
        if self._pool is None or self._loop is not loop:
            self._pool, self._loop = SandboxPool(self.config), loop
        return self._pool

    async def close(self) -> None:
        if self._pool is not None and self._loop is asyncio.get_running_loop():
            await self._pool.close()
        self._pool = self._loop = None


_shared = _Shared()


async def python(code: str) -> str:
    """Run a Python program and return what it prints.

    Args:
        code: The program. Nothing of earlier programs remains.
    """
    return answer(await _shared.pool().run(Program(code=code)))


def configure(config: SandboxConfig) -> None:
    """Settings of the pool that the first call makes."""
    _shared.config = config


async def close() -> None:
    """End the pool with all that runs in it; a later call makes a new one."""
    await _shared.close()


def answer(result: Result) -> str:
    """What the model is told: the output, then the last lines of the error or why the program was stopped."""
    parts = [result.stdout.rstrip("\n")]
    if result.ended is not Ended.ok:
        parts += result.stderr.rstrip("\n").split("\n")[-NUM_ERROR_LINES:]
        parts.append(_REASONS.get(result.ended, ""))
        if result.ended is Ended.error and not result.stderr.strip():
            parts.append(f"exit status {result.exit_status}")
    return "\n".join(part for part in parts if part) or "no output"
