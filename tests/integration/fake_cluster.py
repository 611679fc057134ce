"""A SLURM cluster of this machine for tests: slimrl's own job scripts through the commands in fake_slurm/."""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from slimrl.base.processes import await_end

ROOT = Path(__file__).parents[2]
NO_GPU = (
    *("--venv", sys.prefix, "--gpus-per-node", "0", "--min-free-gib", "1"),
    *("--object-store-gib", "0.2", "--allreduce-timeout-s", "60"),
)
"""Options of a job on nodes like this machine."""


def sbatch_command(state: Path, nodes: int, script: Path, *arguments: str) -> list[str]:
    """Stays until the job has ended."""
    return ["sbatch", "--wait", "-N", str(nodes), str(script), *NO_GPU, "--log-dir", str(state / "logs"), *arguments]


class FakeJob:
    """A job under way, whose logs are in `state / "logs"`; all of its processes are known, and ended by `close`."""

    def __init__(
        self,
        state: Path,
        command: Sequence[str],
        *,
        faults: dict[str, dict[str, str]] | None = None,
        names: Sequence[str] = (),
    ) -> None:
        """Submit it.

        Args:
            state: a new folder, for the fake commands.
            command: sbatch, or what calls it.
            faults: environment that only the tasks of a node have.
            names: of the nodes, where they are not node0, node1, ...
        """
        state.mkdir()
        # Its ports and the names of its folders follow from it.
        self.job_id = random.SystemRandom().randrange(10**6)
        for node, environment in (faults or {}).items():
            (state / f"{node}.env").write_text(json.dumps(environment))
        if names:
            (state / "names").write_text("\n".join(names))
        self.state, self.logs = state, state / "logs"
        here = Path(__file__).parent
        self._environment = {
            **os.environ,
            "PATH": f"{here / 'fake_slurm'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(here),
            "FAKE_SLURM": str(state),
            "FAKE_SLURM_JOB_ID": str(self.job_id),
            "FAKE_SLURM_PYTHON": sys.executable,
        }
        self._output = (state / "job.log").open("w")
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
        )
        self._family = {psutil.Process(self.process.pid)}

    @property
    def output(self) -> str:
        """What the submission and the job have printed."""
        logs = [self.state / "job.log", self.logs / f"{self.job_id}.log"]
        return "".join(log.read_text() for log in logs if log.exists())

    def everything(self) -> str:
        """All logs, for the message of a test that fails."""
        logs = sorted(self.logs.rglob("*.log"))
        return "\n".join([self.output, *(f"== {log}\n{log.read_text(errors='replace')[-3000:]}" for log in logs)])

    def adopt(self) -> None:
        """Know the processes of a job that its submission has left behind."""
        file = self.state / "controller.pid"
        self.wait_until(lambda: file.exists() and bool(file.read_text()), 30)
        self._family.add(psutil.Process(int(file.read_text())))

    def cancel(self) -> None:
        """As its user does."""
        subprocess.run(["scancel", str(self.job_id)], env=self._environment, timeout=30, check=True)

    def wait(self, timeout_s: float) -> int:
        """The job's exit code."""
        self.wait_until(lambda: self.process.poll() is not None, timeout_s)
        return self.process.returncode

    def wait_until(self, holds: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not holds():
            self._note()
            assert time.monotonic() < deadline, f"not within {timeout_s} s\n{self.everything()}"
            time.sleep(0.2)

    def signal(self, number: int) -> None:
        """To the batch script alone, as `sbatch --signal=B:` does."""
        os.kill(int((self.state / "batch.pid").read_text()), number)

    def kill_node(self, node: str) -> None:
        """Every process of its running steps at once, as when the power fails."""
        for file in self.state.glob(f"*.{node}.pid"):
            try:
                task = psutil.Process(int(file.read_text()))
                processes = [task, *task.children(recursive=True)]
            except (FileNotFoundError, psutil.NoSuchProcess):
                continue
            for process in processes:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue

    def left(self, timeout_s: float = 30.0) -> list[str]:
        """Command lines of processes of the job that outlive it by more than the deadline."""
        self._note()
        lines = []
        for process in await_end(self._family, timeout_s):
            with suppress(psutil.NoSuchProcess):
                lines.append(" ".join(process.cmdline())[:200])
        return lines

    def close(self) -> None:
        self._note()
        for process in self._family:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait()
        self._output.close()
        # A node that died could not remove its own.
        for folder in self.temp_dirs():
            shutil.rmtree(folder, ignore_errors=True)

    def temp_dirs(self) -> list[Path]:
        """Ray's temporary folders on all nodes."""
        return sorted(Path("/tmp").glob(f"slimrl-ray-{self.job_id}-*"))

    def _note(self) -> None:
        for member in list(self._family):
            try:
                self._family |= set(member.children(recursive=True))
            except psutil.NoSuchProcess:
                continue
