"""A command in a pseudo terminal, as a user sees it."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from collections.abc import Callable, Mapping, Sequence

_STEERING = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>78]|\r")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
"""What no text in a pipe has, whatever a policy wrote"""
INTERRUPT = b"\x03"


def without_steering(text: str) -> str:
    """The text of a terminal without colours and movements of the cursor."""
    return _STEERING.sub("", text)


class TerminalRun:
    """Starts the command; used as a context manager, which ends it."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        rows: int = 45,
        columns: int = 120,
    ) -> None:
        self.raw = ""
        """Everything that it has written so far"""
        self._pid, self._terminal = pty.fork()
        if not self._pid:
            os.execvpe(arguments[0], list(arguments), {**os.environ, "TERM": "xterm-256color", **(environment or {})})
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    @property
    def text(self) -> str:
        return without_steering(self.raw)

    def send(self, keys: bytes) -> None:
        os.write(self._terminal, keys)

    def read_until(self, holds: Callable[[str], bool], timeout_s: float) -> str:
        """The text when something holds of it."""
        deadline = time.monotonic() + timeout_s
        while not holds(self.text):
            assert self._read(), f"it has ended:\n{self.text[-4000:]}"
            assert time.monotonic() < deadline, f"it has not come:\n{self.text[-4000:]}"
        return self.text

    def end(self, timeout_s: float) -> int:
        """The exit code, when it has ended by itself."""
        deadline = time.monotonic() + timeout_s
        while self._read():
            assert time.monotonic() < deadline, f"it goes on:\n{self.text[-4000:]}"
        return os.waitstatus_to_exitcode(self._reap())

    def _reap(self) -> int:
        _, status = os.waitpid(self._pid, 0)
        self._pid = 0
        return status

    def _read(self) -> bool:
        """Read what comes within a moment; False at the end."""
        if not select.select([self._terminal], [], [], 0.2)[0]:
            return True
        try:
            part = os.read(self._terminal, 1 << 16)
        except OSError:
            # Linux: the last process has closed its side.
            return False
        self.raw += part.decode(errors="replace")
        return bool(part)

    def __enter__(self) -> "TerminalRun":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            self._reap()
        os.close(self._terminal)
