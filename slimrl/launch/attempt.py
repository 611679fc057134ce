"""The folder of one attempt of a job, on the shared file system, and the steps that run under it.

    <log_dir>/<job id>/latest -> attempt_001
    <log_dir>/<job id>/attempt_001/
        canary, control, plan.json      what the nodes read
        token                           what Ray's processes know each other by, for this user's eyes alone
        preflight/, allreduce_0/        what they report
        checkpoints                     step of the run's checkpoint that the command went on from, then of each that it
                                        wrote, one a line
        STEP.NODE.log, STEP.srun.log    what they and srun print; of the preflight, which has an srun for each node,
                                        both are in preflight.NODE.log

Standard library alone, see slurm.py.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from slimrl.launch.reports import LaunchError
from slimrl.launch.slurm import named_nodes, srun_command

END_TIMEOUT_S = 60.0
"""How long a step may take to end after it was told to, before its srun is told, and how long srun may take then."""

MOST_UNOPENED = 5
"""So many attempts in a row that are ended before their command has opened its run end the job."""

POLL_S = 0.2
TAIL_LINES = 5


class Preempted(Exception):
    """A signal came while nothing was running that could be saved.

    Its steps go on: who catches it ends them, after what is more urgent.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        super().__init__()
        self.steps = steps


@dataclass(frozen=True)
class AttemptFolder:
    """Paths of one attempt."""

    path: Path

    @property
    def canary(self) -> Path:
        return self.path / "canary"

    @property
    def control(self) -> Path:
        return self.path / "control"

    @property
    def token(self) -> Path:
        return self.path / "token"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def opened_run(self) -> bool:
        """Whether the command came as far as to say what it goes on from."""
        return bool(_lines(self.checkpoints))

    @property
    def gained_checkpoint(self) -> bool:
        """Whether the next attempt goes on from another checkpoint than this one."""
        return len(_lines(self.checkpoints)) > 1

    def log(self, step: str, node: str) -> Path:
        return self.path / f"{step}.{node}.log"

    def say(self, word: str) -> None:
        """To everyone who reads the control file; written in place, so that open handles and caches see it."""
        self.control.write_text(word + "\n")

    def write_plan(self, plan: dict[str, Any]) -> None:
        self.plan.write_text(json.dumps(plan, indent=2) + "\n")


def attempt_folder(log_dir: Path, job_id: int, attempt: int) -> AttemptFolder:
    """Of any attempt of a job."""
    return AttemptFolder(log_dir.absolute() / str(job_id) / f"attempt_{attempt:03d}")


def open_attempt(log_dir: Path, job_id: int, attempt: int) -> AttemptFolder:
    """A new folder with canary and control file; `latest` points to it."""
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
    """Refuse to queue a job again that would go on so for ever.

    An attempt that was ended before it opened the run does not show whether a step fits into one, and is passed over.

    Args:
        attempts: of the job, the newest first.

    Returns:
        How many of the newest did not open the run.

    Raises:
        LaunchError: they are `MOST_UNOPENED`; or the newest opened it, and neither it nor the one before that opened it
            made a new checkpoint.
    """
    unopened = len(list(takewhile(lambda attempt: not attempt.opened_run, attempts)))
    if unopened >= MOST_UNOPENED:
        raise LaunchError(
            f"{unopened} attempts in a row were ended before they opened the run, so the job is not queued again."
        )
    if unopened:
        return unopened
    newest = list(islice((attempt for attempt in attempts if attempt.opened_run), 2))
    if len(newest) == 2 and not any(attempt.gained_checkpoint for attempt in newest):
        raise LaunchError(
            f"{newest[1].path.name} and {newest[0].path.name} made no new checkpoint, so the job is not queued again. "
            "The start, a step and its checkpoint have to fit between the job's begin and its time limit, a step and a "
            "checkpoint between the signal and the limit."
        )
    return 0


class Step:
    """An srun under way, and the logs of its nodes."""

    def __init__(self, name: str, nodes: Sequence[str], process: subprocess.Popen[bytes], folder: AttemptFolder):
        self.name, self.nodes, self.process = name, list(nodes), process
        self._folder = folder

    @property
    def code(self) -> int | None:
        """Exit code, None while it runs."""
        return self.process.poll()

    def wait(self, timeout_s: float, stop: Callable[[], bool]) -> bool:
        """Whether it ended by itself within the deadline; see wait_for."""
        return bool(wait_for([self], timeout_s, stop))

    def end(self, after_s: float = END_TIMEOUT_S) -> None:
        """Wait for what was told to end by the control file; then tell its srun, then kill that."""
        wait_for([self], after_s, lambda: False)

    def failure(self) -> str:
        """What SLURM says of it, which names the node, and the last lines of the nodes that srun names."""
        said = _lines(self._folder.log(self.name, "srun"))
        shown = named_nodes("\n".join(said), self.nodes) or self.nodes[:1]
        lines = [f"{self.name} ended with code {self.code}", *said[-TAIL_LINES:]]
        for node in shown[:TAIL_LINES]:
            log = self._folder.log(self.name, node)
            lines += [f"{log}:", *(f"    {line}" for line in _lines(log)[-TAIL_LINES:])]
        return "\n  ".join(lines)

    def last_words(self, node: str) -> str:
        """The last two lines that are there of one node: a program's error, and what srun makes of it."""
        lines = [line.strip() for line in _lines(self._folder.log(self.name, node)) if line.strip()]
        return "; ".join(lines[-2:])


def wait_for(steps: Sequence[Step], timeout_s: float, stop: Callable[[], bool]) -> list[Step]:
    """Those that ended by themselves within the deadline; all others are ended then.

    Raises:
        Preempted: `stop` turned true, even where all had ended by then; steps that go on are not waited for.
    """
    _await_end(steps, timeout_s, stop)
    in_time = [step for step in steps if step.code is not None]
    end_steps(steps, stop)
    return in_time


def end_steps(steps: Sequence[Step], stop: Callable[[], bool] = lambda: False) -> None:
    """Tell the srun of each, then kill it; raises Preempted as `wait_for`."""
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
    name: str,
    nodes: Sequence[str],
    command: Sequence[str],
    *,
    container: Sequence[str],
    gpus: int,
    stop_together: bool = True,
) -> Step:
    """Start srun; its own messages go to NAME.srun.log.

    Raises:
        LaunchError: there is no srun.
    """
    full = srun_command(
        nodes, folder.log(name, "%N"), command, container=container, gpus=gpus, stop_together=stop_together
    )
    return Step(name, nodes, _start(full, folder.log(name, "srun")), folder)


def start_alone(
    folder: AttemptFolder, name: str, node: str, command: Sequence[str], *, container: Sequence[str], gpus: int
) -> Step:
    """As start_step with an srun of its own, which brings what is printed to the batch host.

    A node that cannot start a task, or has no shared file system to open a log on, ends all of an srun. So what may
    be the matter with a node is asked of each by itself.
    """
    full = srun_command([node], None, command, container=container, gpus=gpus)
    return Step(name, [node], _start(full, folder.log(name, node)), folder)


def _start(command: Sequence[str], output: Path) -> subprocess.Popen[bytes]:
    with output.open("wb") as log:
        try:
            # Its own session: Ctrl-C and signals for the batch script's group reach the job alone, which decides.
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        except FileNotFoundError as error:
            raise LaunchError("no srun on PATH") from error


def _await_end(steps: Sequence[Step], timeout_s: float, stop: Callable[[], bool]) -> None:
    deadline = time.monotonic() + timeout_s
    while any(step.code is None for step in steps) and time.monotonic() < deadline and not stop():
        time.sleep(POLL_S)


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines() if path.is_file() else []
