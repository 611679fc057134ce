"""A server process: started in its own session, watched, and ended by pid with its descendants."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import httpx
import psutil

from slimrl.base.processes import await_end, lives, send_all

_POLL_S = 0.1
_LOG_LINES = 15
"""Log lines that an error shows if none of them looks like the cause."""


class ServerError(RuntimeError):
    """A server process did not start, or ended; the message has the cause from its log."""


class ServerProcess:
    """A running server; `name` is for messages, such as "engine 0"."""

    def __init__(
        self, name: str, command: Sequence[str], env: Mapping[str, str], log: Path, *, pass_fds: Sequence[int] = ()
    ) -> None:
        """Start it with this process's environment and the variables of `env`. Its output overwrites `log`.

        Args:
            pass_fds: descriptors that it inherits.
        """
        self.name = name
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                list(command),
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=tuple(pass_fds),
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self) -> None:
        """Raises ServerError if the process has ended."""
        if (code := self._process.poll()) is not None:
            if code < 0:
                ending = describe_signal(signal.Signals(-code), self._lines())
                raise ServerError(f"{self.name} was ended by {ending} (log: {self.log})")
            cause = find_cause(self._lines())
            raise ServerError(f"{self.name} ended with exit code {code}: {cause} (log: {self.log})")

    def wait_ready(self, url: str, timeout_s: float, headers: Mapping[str, str] | None = None) -> None:
        """Wait until `url` answers 200 to a request with these headers.

        Raises:
            ServerError: the process ended, or did not answer in time.
        """
        deadline = time.monotonic() + timeout_s
        # One client for all attempts: a new one reads the system's certificates, which takes 30 ms of a core.
        with httpx.Client(headers=headers, trust_env=False) as client:
            while time.monotonic() < deadline:
                self.check()
                request_timeout_s = max(1.0, min(20.0, deadline - time.monotonic()))
                # An error means that it does not listen yet.
                with suppress(httpx.TransportError):
                    if client.get(url, timeout=request_timeout_s).status_code == 200:
                        return
                time.sleep(_POLL_S)
        cause = find_cause(self._lines())
        raise ServerError(f"{self.name} was not ready within {timeout_s:.0f} s: {cause} (log: {self.log})")

    def _lines(self) -> list[str]:
        return self.log.read_text(errors="replace").splitlines() if self.log.exists() else []

    def stop(self, timeout_s: float = 10.0, first: signal.Signals = signal.SIGTERM) -> None:
        """End the process and its descendants by `first`, and after `timeout_s` by SIGKILL. Idempotent.

        Raises:
            ServerError: the process survives SIGKILL.
        """
        members = self._members()
        send_all(members, first)
        alive = await_end(members, timeout_s)
        # The process may have started more on SIGTERM.
        alive = list({*alive, *self._members()})
        send_all(alive, signal.SIGKILL)
        await_end(alive, timeout_s)
        try:
            self._process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise ServerError(f"{self.name} (process {self.pid}) is alive {timeout_s:.0f} s after SIGKILL") from error

    def _members(self) -> list[psutil.Process]:
        """The process, its descendants, and orphans of its session."""
        members: set[psutil.Process] = set()
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.pid)
            members = {root, *root.children(recursive=True)} if self._process.poll() is None else set()
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == self.pid and lives(process):
                    members.add(process)
            except ProcessLookupError:
                continue
        return list(members)


def find_cause(lines: list[str]) -> str:
    """The last error of a log, else its last lines."""
    if error := last_error(lines):
        return error
    tail = [line for line in lines if line.strip()][-_LOG_LINES:]
    return "\n".join(tail) if tail else "its log is empty"


def describe_signal(number: signal.Signals, lines: list[str]) -> str:
    """The signal's name and the cause from the log: SGLang sends itself SIGKILL when one of its processes raises."""
    if error := last_error(lines):
        return f"{number.name}; the last error in its log: {error}"
    hint = "; the memory may have run out" if number is signal.SIGKILL else ""
    return f"{number.name}, without an error in its log{hint}"


def last_error(lines: list[str]) -> str:
    """The last line of the last Python traceback, or the interpreter's message about a crash; empty without either.

    An exception without a message gets the line of code that raised it. SGLang's parent logs a traceback after its
    child's, so tracebacks of mere process handling are skipped.
    """
    causes = []
    inside, code = False, ""
    for line in lines:
        text = line.strip()
        if "Traceback (most recent call last)" in line:
            inside = True
        elif line.startswith("Fatal Python error"):
            causes.append(text)
        elif inside and line[:1].isspace():
            code = code if text.startswith("File ") or not text.strip("^~") else text
        elif inside and line and not line.startswith(("[", "During", "The above")):
            inside = False
            causes.append(text if ":" in text else f"{text}: {code}")
    secondary = ("RuntimeError: Rank 0 scheduler", "SystemExit", "EOFError", "KeyboardInterrupt")
    primary = [cause for cause in causes if not cause.startswith(secondary)]
    return (primary or causes or [""])[-1]
