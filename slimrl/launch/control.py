"""Runs one command of a job under the control of the job's script, which may be on another machine.

The job writes one word to a control file on the shared file system, which every node reads each second: `run`,
`preempt` (SIGUSR1, once, to a command that can save) or `end`. The file exists from the start and is reopened for each
read: NFS shows the current contents at each open, but may hide a new file for a minute. A signal through SLURM would
reach every process of a step, engines and Ray's own included; this one reaches only the command.

However the command ends, its descendants are ended by pid.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from slimrl.base.processes import END_S, await_end, send_all

RUN, PREEMPT, END = "run", "preempt", "end"

POLL_S = 1.0
UNREADABLE_S = 120.0
"""Seconds for which the control file may be unreadable before the command is ended."""
END_TIMEOUT_S = 20.0
"""Seconds from SIGTERM to SIGKILL, for a command that has something to save or to tidy up."""


def run_under_control(
    command: Sequence[str],
    control: Path,
    environment: Mapping[str, str] | None = None,
    *,
    preemptible: bool,
    end_timeout_s: float = END_TIMEOUT_S,
) -> int:
    """Run a command until it ends, the control file says `end`, or this process gets SIGTERM. Leaves no process, but
    for one that even SIGKILL does not end, as on a file system that has gone; stderr names it.

    Args:
        preemptible: pass `preempt` on as SIGUSR1, which ends a command that has no handler for it.
        end_timeout_s: from SIGTERM to SIGKILL.

    Returns:
        Its exit code, negative for a signal to either process; 0 if the job said `end`.
    """
    child = subprocess.Popen(command, env=environment)
    family = {psutil.Process(child.pid)}
    words, signals = _Words(control), list[int]()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: signals.append(number))
    preempted = False
    try:
        while child.poll() is None and not signals:
            word = words.read()
            if word == END:
                return 0
            if word == PREEMPT and preemptible and not preempted:
                preempted = True
                child.send_signal(signal.SIGUSR1)
            family = _noted(family)
            time.sleep(POLL_S)
    finally:
        _end(child, _noted(family), end_timeout_s)
    return -signal.SIGTERM if signals else child.returncode


class _Words:
    """Reader of the control file; while the file system fails, it repeats the last word."""

    def __init__(self, control: Path) -> None:
        self._control, self._word = control, RUN
        self._read_s = time.monotonic()

    def read(self) -> str:
        """Raises OSError if the file has been unreadable for UNREADABLE_S."""
        try:
            self._word = self._control.read_text().strip()
            self._read_s = time.monotonic()
        except OSError:
            if time.monotonic() - self._read_s > UNREADABLE_S:
                raise
        return self._word


def _noted(family: set[psutil.Process]) -> set[psutil.Process]:
    """The family with all descendants that its members have now; those of a dead member were noted while it lived."""
    found = set(family)
    for member in family:
        try:
            found |= set(member.children(recursive=True))
        except psutil.NoSuchProcess:
            continue
    return found


def _end(child: subprocess.Popen[bytes], family: set[psutil.Process], timeout_s: float) -> None:
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            child.kill()
            with suppress(subprocess.TimeoutExpired):
                child.wait(END_S)
    # The survivors are orphans: nobody else will end them.
    alive = await_end(family, 2.0)
    for number in (signal.SIGTERM, signal.SIGKILL):
        send_all(alive, number)
        alive = await_end(alive, timeout_s)
    for process in alive:
        print(f"pid {process.pid} was killed and does not end: it waits within the kernel", file=sys.stderr)
