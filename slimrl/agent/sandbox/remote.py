"""A sandbox on another machine: a server with the HTTP interface of SandboxFusion, `POST /run_code`.

The server isolates, and enforces CPU time, processes and files by its own settings; it gets the limits of wall clock
and memory with each run.
"""

import json
import time
from pathlib import Path
from typing import Any

import aiohttp

from slimrl.agent.sandbox.interface import Ended, Language, Program, Result, SandboxError, Session
from slimrl.agent.sandbox.outcome import why
from slimrl.config.schema.agent import SandboxConfig, SandboxLimits

ANSWER_S = 30.0
"""How much later than a run's own deadline the server may answer."""
KEPT_S = 2.0
"""How long an idle connection is kept, less than servers do: a run on one that closes just then would fail."""
LANGUAGES = {Language.python: "python", Language.shell: "bash"}


class RemoteSandbox:
    """A client of one server, or of a balancer in front of several."""

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._client: aiohttp.ClientSession | None = None
        """Made on the event loop of the first run"""

    async def run(self, program: Program, limits: SandboxLimits | None = None) -> Result:
        limits = limits or self._config.limits
        start = time.monotonic()
        request = {
            "code": program.code,
            "language": LANGUAGES[program.language],
            "run_timeout": limits.wall_s,
            "memory_limit_MB": max(1, limits.memory_bytes // 1024**2),
            "stdin": program.stdin.decode("utf-8", "replace"),
        }
        try:
            if self._client is None:
                self._client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(keepalive_timeout=KEPT_S))
            answer_s = limits.wall_s + ANSWER_S
            timeout = aiohttp.ClientTimeout(total=None, connect=answer_s, sock_read=answer_s)
            url = f"{self._config.url.rstrip('/')}/run_code"
            async with self._client.post(url, json=request, timeout=timeout, allow_redirects=False) as response:
                response.raise_for_status()
                answer = json.loads(await response.read())
            return _result(answer, limits, time.monotonic() - start)
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
            raise SandboxError(f"{self._config.url}: {error!r}") from error

    async def session(
        self, language: Language = Language.python, *, folder: Path | None = None, limits: SandboxLimits | None = None
    ) -> Session:
        raise SandboxError("a remote sandbox has no sessions; use bubblewrap or container")

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()


def _result(answer: dict[str, Any], limits: SandboxLimits, seconds: float) -> Result:
    """Raises SandboxError if the server did not run the program."""
    run = answer["run_result"] or answer["compile_result"]
    if answer["status"] == "SandboxError" or run is None or run["status"] == "Error":
        raise SandboxError(f"the server failed: {answer['message']}")
    stdout, rest = _cut(run["stdout"] or "", limits.output_bytes)
    stderr, _ = _cut(run["stderr"] or "", rest)
    status = run["return_code"]
    if len(stdout) < len(run["stdout"] or "") or len(stderr) < len(run["stderr"] or ""):
        ended, status = Ended.output, None
    elif run["status"] == "TimeLimitExceeded":
        ended, status = Ended.timeout, None
    else:
        ended = why(status, stderr)
    seconds = seconds if run["execution_time"] is None else run["execution_time"]
    return Result(stdout=stdout, stderr=stderr, exit_status=status, ended=ended, seconds=seconds)


def _cut(text: str, limit_bytes: int) -> tuple[str, int]:
    """The text as far as the limit, and how many bytes it leaves."""
    data = text.encode("utf-8", "replace")
    if len(data) <= limit_bytes:
        return text, limit_bytes - len(data)
    return data[:limit_bytes].decode("utf-8", "ignore"), 0
