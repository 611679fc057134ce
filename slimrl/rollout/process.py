"""One server process: started in a group of its own, watched, and ended by its pid with everything below it."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
import psutil

_POLL_S = 0.1
_LOG_LINES = 15
"""Lines of the log that an error shows when none of them looks like its cause."""


class ServerError(RuntimeError):
    """A server process did not start, or ended; the message carries the cause from its log."""


class ServerProcess:
    """A started process that answers HTTP; `name` is for people, as in "engine 0"."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        """Start it. Output goes to `log`, which is made anew, and its variables to the environment of this process."""
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
            raise ServerError(f"{self.name} ended with exit code {code}: {self.cause()} (log: {self.log})")

    def wait_ready(self, url: str, timeout_s: float) -> None:
        """Wait until `url` answers 200.

        Raises:
            ServerError: the process ended, or did not answer in time.
        """
        deadline = time.monotonic() + timeout_s
        # One client for all attempts: a new one reads the system's certificates, which takes 30 ms of a core.
        with httpx.Client(trust_env=False) as client:
            while time.monotonic() < deadline:
                self.check()
                try:
                    timeout = max(1.0, min(20.0, deadline - time.monotonic()))
                    if client.get(url, timeout=timeout).status_code == 200:
                        return
                except httpx.TransportError:
                    pass  # Not listening yet; the deadline of this loop decides.
                time.sleep(_POLL_S)
        raise ServerError(f"{self.name} was not ready within {timeout_s:.0f} s: {self.cause()} (log: {self.log})")

    def cause(self) -> str:
        """The last exception in the log, else the log's last lines."""
        return find_cause(self._lines())

    def _lines(self) -> list[str]:
        return self.log.read_text(errors="replace").splitlines() if self.log.exists() else []

    def stop(self, timeout_s: float = 10.0, first: signal.Signals = signal.SIGTERM) -> None:
        """End the process and all below it: by `first`, and SIGKILL for those alive after `timeout_s`. Idempotent.

        Raises:
            ServerError: the kernel has not ended it even so.
        """
        members = self._members()
        for member in members:
            _send(member, first)
        _, alive = psutil.wait_procs(members, timeout=timeout_s)
        # SIGTERM may have started more.
        alive = list({*alive, *self._members()})
        for member in alive:
            _send(member, signal.SIGKILL)
        psutil.wait_procs(alive, timeout=timeout_s)
        try:
            self._process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise ServerError(f"{self.name} (process {self.pid}) is alive {timeout_s:.0f} s after SIGKILL") from error

    def _members(self) -> list[psutil.Process]:
        """The process, what it started, and what is left of its session when a process between has ended."""
        members = set()
        try:
            root = psutil.Process(self.pid)
            members = {root, *root.children(recursive=True)} if self._process.poll() is None else set()
        except psutil.NoSuchProcess:
            pass
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == self.pid and process.status() != psutil.STATUS_ZOMBIE:
                    members.add(process)
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
        return list(members)


def _send(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


def find_cause(lines: list[str]) -> str:
    """What a log says about why its process ended: its last error, else its last lines."""
    if error := last_error(lines):
        return error
    tail = [line for line in lines if line.strip()][-_LOG_LINES:]
    return "\n".join(tail) if tail else "its log is empty"


def describe_signal(number: signal.Signals, lines: list[str]) -> str:
    """Its name and what the log says of the cause; SGLang ends itself by SIGKILL when one of its processes raised."""
    if error := last_error(lines):
        return f"{number.name}; the last error in its log: {error}"
    hint = "; the memory may have run out" if number is signal.SIGKILL else ""
    return f"{number.name}, without an error in its log{hint}"


def last_error(lines: list[str]) -> str:
    """The final line of the last Python traceback that names an exception, or what the interpreter said of a crash.

    SGLang's children log their traceback and the parent's follows, so tracebacks of mere process handling are passed
    over. An exception without a message is given the line of code that raised it. Empty where there is neither.
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
