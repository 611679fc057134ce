"""A sandbox on another machine: a server with the HTTP interface of SandboxFusion, `POST /run_code`.

The server isolates, and enforces CPU time, processes and files by its own settings; it gets the limits of wall clock
and memory with each run.
"""

import time
from pathlib import Path
from typing import Any

import httpx

from slimrl.agent.sandbox.interface import Ended, Language, Program, Result, SandboxError, Session
from slimrl.agent.sandbox.outcome import why
from slimrl.config.schema.agent import SandboxConfig, SandboxLimits

ANSWER_S = 30.0
"""How much later than a run's own deadline the server may answer."""
LANGUAGES = {Language.python: "python", Language.shell: "bash"}


class RemoteSandbox:
    """A client of one server, or of a balancer in front of several."""

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._client = httpx.AsyncClient(base_url=config.url.rstrip("/"), trust_env=False)

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
            response = await self._client.post("/run_code", json=request, timeout=limits.wall_s + ANSWER_S)
            response.raise_for_status()
            answer = response.json()
            return _result(answer, limits, time.monotonic() - start)
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise SandboxError(f"{self._config.url}: {error!r}") from error

    async def session(
        self, language: Language = Language.python, *, folder: Path | None = None, limits: SandboxLimits | None = None
    ) -> Session:
        raise SandboxError("a remote sandbox has no sessions; use bubblewrap or container")

    async def close(self) -> None:
        await self._client.aclose()


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
