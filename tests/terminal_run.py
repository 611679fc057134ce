"""A command in a pseudo terminal, as a user sees it."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
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
        self._terminal, inside = pty.openpty()
        fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        # A test runner's own would be believed more than the terminal.
        without_size = {k: v for k, v in (environment or os.environ).items() if k not in ("COLUMNS", "LINES")}
        # It gets the terminal as its own, so that Ctrl-C reaches it.
        self._process = subprocess.Popen(
            ["setsid", "--ctty", *arguments],
            env={**without_size, "TERM": "xterm-256color"},
            stdin=inside,
            stdout=inside,
            stderr=inside,
        )
        os.close(inside)

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
        return self._process.wait(max(1.0, deadline - time.monotonic()))

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
        self._process.kill()
        self._process.wait()
        os.close(self._terminal)
