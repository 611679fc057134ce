"""The folder of one attempt of a job, on the shared file system, and the attempt's SLURM steps.

    <log_dir>/<job id>/latest -> attempt_001
    <log_dir>/<job id>/attempt_001/
        canary, control, plan.json      what the nodes read
        token                           Ray's authentication token, readable by this user alone
        preflight/, allreduce_0/        reports of the nodes
        checkpoints                     a line for each checkpoint's step: first the one that the command continued
                                        from, then those that it wrote
        STEP.NODE.log, STEP.srun.log    output of nodes and srun; the preflight has an srun for each node, so both are
                                        in preflight.NODE.log

Standard library alone, see slurm.py.
"""

from __future__ import annotations

import argparse
import secrets
import subprocess
import time
from collections.abc import Callable, Sequence
from itertools import islice, takewhile
from pathlib import Path

from slimrl.launch.reports import LaunchError
from slimrl.launch.slurm import named_nodes, srun_command

END_TIMEOUT_S = 60.0
"""How long a step may take to end by itself, before srun gets SIGTERM; and then srun, before it gets SIGKILL."""

MOST_UNOPENED = 5
"""Largest number of attempts in a row that may end before their command opened the run; then the job ends."""

POLL_S = 0.2
TAIL_LINES = 5


class Preempted(Exception):
    """A signal came before the command started.

    Its steps still run: the caller ends them, after what is more urgent.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        super().__init__()
        self.steps = steps


class AttemptFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.canary, self.control, self.token = path / "canary", path / "control", path / "token"
        self.plan, self.checkpoints = path / "plan.json", path / "checkpoints"

    @property
    def opened_run(self) -> bool:
        """Whether the command opened the run, and so wrote which checkpoint it continues from."""
        return bool(_lines(self.checkpoints))

    @property
    def gained_checkpoint(self) -> bool:
        return len(_lines(self.checkpoints)) > 1

    def log(self, step: str, node: str) -> Path:
        return self.path / f"{step}.{node}.log"

    def say(self, word: str) -> None:
        """Write to the control file, in place, so that open handles and caches see it."""
        self.control.write_text(word + "\n")


def attempt_folder(log_dir: Path, job_id: int, attempt: int) -> AttemptFolder:
    return AttemptFolder(log_dir.absolute() / str(job_id) / f"attempt_{attempt:03d}")


def open_attempt(log_dir: Path, job_id: int, attempt: int) -> AttemptFolder:
    """Create the folder with canary, control file and token, and point `latest` to it."""
    folder = attempt_folder(log_dir, job_id, attempt)
    folder.path.mkdir(parents=True)
    folder.canary.write_text(f"{job_id} {attempt} {time.time_ns()}\n")
    folder.say("run")
    folder.token.touch(mode=0o600)
    folder.token.write_text(secrets.token_hex(32))
    link = folder.path.parent / "latest"
    fresh = folder.path.parent / ".latest"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(folder.path.name)
    fresh.replace(link)
    return folder


def check_progress(attempts: Sequence[AttemptFolder]) -> int:
    """Refuse to requeue a job whose attempts make no progress.

    An attempt that was ended before it opened the run does not show whether a step fits into an attempt. It is skipped.

    Args:
        attempts: of the job, the newest first.

    Returns:
        Number of newest attempts in a row that did not open the run.

    Raises:
        LaunchError: there are MOST_UNOPENED of these; or the newest attempt opened the run, and neither it nor the
            previous one that did wrote a checkpoint.
    """
    unopened = len(list(takewhile(lambda attempt: not attempt.opened_run, attempts)))
    if unopened >= MOST_UNOPENED:
        raise LaunchError(
            f"{unopened} attempts in a row were ended before they opened the run, so the job is not requeued."
        )
    if unopened:
        return unopened
    newest = list(islice((attempt for attempt in attempts if attempt.opened_run), 2))
    if len(newest) == 2 and not any(attempt.gained_checkpoint for attempt in newest):
        raise LaunchError(
            f"{newest[1].path.name} and {newest[0].path.name} wrote no new checkpoint, so the job is not requeued. "
            "The time limit must leave room for the start, a step and its checkpoint, and the signal must come early "
            "enough before it for a step and a checkpoint."
        )
    return 0


class Step:
    """A running srun, and the logs of its nodes."""

    def __init__(self, name: str, nodes: Sequence[str], process: subprocess.Popen[bytes], folder: AttemptFolder):
        self.name, self.nodes, self.process = name, list(nodes), process
        self._folder = folder

    @property
    def code(self) -> int | None:
        """Exit code, None while it runs."""
        return self.process.poll()

    def wait(self, timeout_s: float, stop: Callable[[], bool]) -> bool:
        """Whether it ended by itself in time; see wait_for."""
        return bool(wait_for([self], timeout_s, stop))

    def end(self, after_s: float = END_TIMEOUT_S) -> None:
        """Give a step that the control file told to end some time; then end its srun."""
        wait_for([self], after_s, lambda: False)

    def failure(self) -> str:
        """srun's messages, and the last log lines of the nodes that they name."""
        said = _lines(self._folder.log(self.name, "srun"))
        shown = named_nodes("\n".join(said), self.nodes) or self.nodes[:1]
        lines = [f"{self.name} ended with code {self.code}", *said[-TAIL_LINES:]]
        for node in shown[:TAIL_LINES]:
            log = self._folder.log(self.name, node)
            lines += [f"{log}:", *(f"    {line}" for line in _lines(log)[-TAIL_LINES:])]
        return "\n  ".join(lines)

    def last_words(self, node: str) -> str:
        """The last two lines of a node's log: a program's error, and srun's message about it."""
        lines = [line.strip() for line in _lines(self._folder.log(self.name, node)) if line.strip()]
        return "; ".join(lines[-2:])


def wait_for(steps: Sequence[Step], timeout_s: float, stop: Callable[[], bool]) -> list[Step]:
    """The steps that ended by themselves in time; the others are ended.

    Raises:
        Preempted: `stop` turned true, even if all steps have ended; steps that still run are left running.
    """
    _await_end(steps, timeout_s, stop)
    in_time = [step for step in steps if step.code is not None]
    end_steps(steps, stop)
    return in_time


def end_steps(steps: Sequence[Step], stop: Callable[[], bool] = lambda: False) -> None:
    """SIGTERM to the srun of each step, then SIGKILL; raises Preempted as `wait_for`."""
    for force in (False, True):
        if stop():
            raise Preempted(steps)
        late = [step for step in steps if step.code is None]
        for step in late:
            if force:
                step.process.kill()
            else:
                step.process.terminate()
        _await_end(late, END_TIMEOUT_S, stop)
    if stop():
        raise Preempted(steps)


def start_step(
    folder: AttemptFolder,
    options: argparse.Namespace,
    name: str,
    nodes: Sequence[str],
    module: str,
    *arguments: str,
    stop_together: bool = True,
) -> Step:
    """Start an srun of a module of slimrl; its own messages go to NAME.srun.log.

    Raises:
        LaunchError: there is no srun.
    """
    command = srun_command(options, nodes, folder.log(name, "%N"), module, arguments, stop_together=stop_together)
    return Step(name, nodes, _start(command, folder.log(name, "srun")), folder)


def start_alone(
    folder: AttemptFolder, options: argparse.Namespace, name: str, node: str, module: str, *arguments: str
) -> Step:
    """Start a step as start_step does, but on one node, whose output srun brings to the batch host.

    A node that cannot start a task, or cannot open a log on the shared file system, ends the whole srun. So nodes that
    may be bad get an srun each.
    """
    command = srun_command(options, [node], None, module, arguments)
    return Step(name, [node], _start(command, folder.log(name, node)), folder)


def _start(command: Sequence[str], output: Path) -> subprocess.Popen[bytes]:
    with output.open("wb") as log:
        try:
            # In its own session, so that signals to the batch script's process group reach only the job.
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        except FileNotFoundError as error:
            raise LaunchError("no srun on PATH") from error


def _await_end(steps: Sequence[Step], timeout_s: float, stop: Callable[[], bool]) -> None:
    deadline = time.monotonic() + timeout_s
    while any(step.code is None for step in steps) and time.monotonic() < deadline and not stop():
        time.sleep(POLL_S)


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines() if path.is_file() else []
