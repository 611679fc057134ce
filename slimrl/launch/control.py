"""A process of a job's step under the control of the job, which may run on another machine.

The job writes one word into a file of the shared file system, and whoever runs a part of the job reads it each second:
`run`, `preempt` (SIGUSR1 to the command that can save, once) or `end`. The file is there from the start and is opened
anew each time, since NFS shows what a file holds now when it is opened, but may hide for a minute that a file has
appeared. Signals sent through SLURM would reach every process of a step, engines and Ray's own included; this reaches
one.

Whatever way a step ends, the processes below it are ended by their pids.
"""

import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

import psutil

RUN, PREEMPT, END = "run", "preempt", "end"

POLL_S = 1.0
UNREADABLE_S = 120.0
"""A file system that fails for longer than this ends the part of the job on this node."""
END_TIMEOUT_S = 20.0
"""How long processes that were told to end may take before they are killed."""


def run_under_control(
    command: Sequence[str], control: Path, environment: Mapping[str, str] | None = None, *, preemptible: bool
) -> int:
    """Run a command until it ends, or is ended by `control` or by SIGTERM to this process; no process is left.

    Args:
        preemptible: whether it gets SIGUSR1 at `preempt`, which ends whoever does not expect it.

    Returns:
        Its exit code, negative for a signal; 0 where the job said `end`.
    """
    child = subprocess.Popen(command, env=environment)
    family = {psutil.Process(child.pid)}
    told, words = _Told(), _Words(control)
    preempted = False
    try:
        while child.poll() is None:
            word = words.read()
            if word == END:
                return 0
            if told.to_end:
                return -signal.SIGTERM
            if word == PREEMPT and preemptible and not preempted:
                preempted = True
                child.send_signal(signal.SIGUSR1)
            family = _noted(family)
            time.sleep(POLL_S)
        return child.returncode
    finally:
        _end(child, _noted(family))


class _Words:
    """The word of the control file; the last one where the file system fails for a moment."""

    def __init__(self, control: Path) -> None:
        self._control, self._word = control, RUN
        self._read_s = time.monotonic()

    def read(self) -> str:
        """Raises OSError where the file has been unreadable for UNREADABLE_S."""
        try:
            self._word = self._control.read_text().strip()
            self._read_s = time.monotonic()
        except OSError:
            if time.monotonic() - self._read_s > UNREADABLE_S:
                raise
        return self._word


class _Told:
    """Notes that SIGTERM or SIGINT came, in place of ending at once."""

    def __init__(self) -> None:
        self.to_end = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.to_end = True


def _noted(family: set[psutil.Process]) -> set[psutil.Process]:
    """With the living descendants of its members: those of a member that has gone were noted before."""
    found = set(family)
    for member in family:
        try:
            found |= set(member.children(recursive=True))
        except psutil.NoSuchProcess:
            continue
    return found


def _end(child: subprocess.Popen[bytes], family: set[psutil.Process]) -> None:
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    # Those that outlive it have lost the process that started them, so nobody else will end them.
    alive = _await_end(family, 2.0)
    for end in (psutil.Process.terminate, psutil.Process.kill):
        for process in alive:
            try:
                end(process)
            except psutil.NoSuchProcess:
                continue
        alive = _await_end(alive, END_TIMEOUT_S)


def _await_end(processes: set[psutil.Process], timeout_s: float) -> set[psutil.Process]:
    """Those that still live after the deadline; a zombie, which waits for its parent alone, does not."""
    deadline = time.monotonic() + timeout_s
    while (alive := {process for process in processes if _lives(process)}) and time.monotonic() < deadline:
        time.sleep(0.1)
    return alive


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
