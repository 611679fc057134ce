"""A run to which faults happen: its Ray nodes, its driver, which may be started again, and its own disk.

A fault is judged by what follows it. Either the run goes on: a step ends after the fault is over, and what the fault
was for has come back. Or the run ends as it should, with its cause, and is continued by `--resume-or-start`.
"""

import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from chaos_calculator import FOLDER
from chaos_clock import Clock
from chaos_legs import COMMON, RECIPES, Leg
from chaos_services import Service
from cli_runs import ENGINE, CliRun, num_logged_steps
from ray_nodes import RayNodes

from slimrl.engines.servers.ports import free_ports
from slimrl.observability.run_folder import RunFolder

TRAINER, ENGINE_ACTOR, WORKER = "ray::TrainerActor", "ray::EngineActor", "sglang::scheduler"
EPISODE_WORKER = "ray::EpisodeWorker"
ENDLESS = "steps=100000"
OURS = (TRAINER, ENGINE_ACTOR, EPISODE_WORKER, ENGINE, WORKER)
DISK_BYTES = 512 * 1024**2
START_S, END_S, BACK_S = 600.0, 180.0, 400.0
"""Deadlines of the first step of a start, of an end with its cause, and of going on after a fault."""
LEFT_S = 60.0
"""After which no process of a run that has ended may be there."""
NO_WANDB = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0" * 40}
"""A server of wandb at a port where nobody listens."""


@dataclass(frozen=True, kw_only=True)
class Hit:
    """What a fault has done."""

    what: str
    back: Callable[[], bool] = lambda: True
    """Whether what it was about serves again, in a run that is continued too."""
    end: str | None = None
    """What a run says that is to end, a regular expression; None for one that is to go on"""
    code: int = 1
    """Exit code of that end"""
    repair: Callable[[], None] = lambda: None
    """Called before the run is continued; raises Broken."""
    settings: tuple[str, ...] = ()
    """With which it is continued."""
    most_lost: int = 0
    """Completed steps that may be done again"""


class Broken(Exception):
    """Something that must hold does not."""


class ChaosRun:
    """The run of a leg."""

    def __init__(
        self, leg: Leg, folder: Path, start: Path, data: Path, service: Service, clock: Clock, rng: random.Random
    ) -> None:
        """
        Args:
            folder: of the leg; it is made anew.
            start: the model.
        """
        self.leg, self.service, self.clock, self.rng = leg, service, clock, rng
        self.offset_s = 0
        """By which the wall clock of the run is wrong"""
        shutil.rmtree(folder, ignore_errors=True)
        self.tools, self.disk, self.data = folder / "tools", folder / "disk", folder / "train.jsonl"
        self._outputs, self.filler = folder / "outputs", self.disk / "filler"
        for path in (self.tools, self.disk, self._outputs):
            path.mkdir(parents=True)
        shutil.copy(data, self.data)
        self.folder = RunFolder(self.disk / leg.name)
        self._model = start
        (self.prometheus,) = free_ports(1)
        self.driver: CliRun | None = None
        self.starts = 0
        self.hit_at, self.steps_at_hit = 0.0, 0
        """When the last fault began, by the monotonic clock, and the steps that had been completed"""
        before = dict(os.environ)
        with ExitStack() as opened:
            opened.callback(service.close)
            # The next run has other folders, ports and a clock of its own.
            opened.callback(os.environ.update, before)
            opened.callback(os.environ.clear)
            self._mount(folder / "disk.img")
            opened.callback(execute, "umount", str(self.disk))
            os.environ |= {FOLDER: str(self.tools), **NO_WANDB, **clock.environment}
            self.nodes = self._open_nodes()
            opened.callback(lambda: self.nodes.close())
            opened.callback(self.kill)
            self._opened = opened.pop_all()

    def _mount(self, image: Path) -> None:
        with image.open("wb") as file:
            file.truncate(DISK_BYTES)
        execute("mkfs.ext4", "-q", "-m", "0", "-F", str(image))
        execute("mount", "-o", "loop", str(image), str(self.disk))

    def _open_nodes(self) -> RayNodes:
        nodes = RayNodes(0, *self.leg.slots, apart=True)
        os.environ |= nodes.environment
        return nodes

    def free_disk(self) -> None:
        """Remove what has filled it."""
        self.filler.unlink(missing_ok=True)

    def note_hit(self) -> None:
        """The fault happens now."""
        self.hit_at, self.steps_at_hit = time.monotonic(), self.steps()

    def renew(self) -> None:
        """Continue the run, whatever has become of it, on other nodes; raises Broken if it does not go on."""
        self.kill()
        self.free_disk()
        self.renew_nodes()
        self.start()
        self.await_step(START_S)

    def renew_nodes(self) -> None:
        """Others in the place of all nodes."""
        self.nodes.close()
        self.nodes = self._open_nodes()

    def nodes_with(self, text: str) -> list[int]:
        """Numbers of the nodes with a process of this text, the head left out."""
        count = range(1, self.nodes.count)
        return [index for index in count if any(text in line for line in self.nodes.command_lines(index))]

    def arguments(self, name: str, *more: str) -> list[str]:
        settings = [
            f"run.dir={self.disk}", f"run.name={name}", f"model.path={self._model}", f"data.train={self.data}",
            f"data.eval.heldout={self.data}", f"tracking.opentelemetry={self.service.url}",
            f"tracking.prometheus=127.0.0.1:{self.prometheus}", "reward.function=''",
            "reward.parts={service: {function: slimrl.rewards.remote:Remote, "
            f"args: {{url: {self.service.url}/reward, retries: 7}}}}}}",
        ]  # fmt: skip
        recipe = str(RECIPES / "gspo_calculator.yaml")
        return ["train", recipe, *settings, *COMMON, *self.leg.settings, *more, "--ray-address", self.nodes.address]

    def command(self, *more: str) -> list[str]:
        """That starts or continues the run."""
        return [*self.arguments(self.folder.path.name, ENDLESS, *more), "--resume-or-start"]

    def start(self, *more: str) -> None:
        """Start the run, or continue it; it goes on until something ends it, unless these settings say how long."""
        self.driver = CliRun(self.command(*more))
        self.starts += 1

    @property
    def process(self) -> psutil.Process:
        assert self.driver is not None
        return psutil.Process(self.driver.process.pid)

    def has_ended(self) -> bool:
        return self.driver is None or self.driver.process.poll() is not None

    def said(self) -> str:
        """All that a driver which has ended has said."""
        assert self.driver is not None
        self.driver.wait(30)
        text = f"{self.driver.stdout}\n{self.driver.stderr}"
        (self._outputs / f"{self.starts:03d}.log").write_text(text)
        return text

    def log(self) -> str:
        path = self.folder.log_file("driver")
        return path.read_text() if path.is_file() else ""

    def members(self, text: str) -> list[psutil.Process]:
        """Processes on all nodes, and of the driver, with this text in their command lines."""
        assert self.driver is not None
        return sorted({*self.nodes.running(text), *self.driver.members(text)}, key=lambda process: process.pid)

    def pick(self, text: str) -> psutil.Process:
        """One of them; raises Broken if there is none."""
        found = self.members(text)
        if not found:
            raise Broken(f"no process has {text} in its command line")
        return self.rng.choice(found)

    def steps(self) -> int:
        """Completed ones that stand in the metrics."""
        return max(0, num_logged_steps(self.folder) - 1)

    def checkpoints(self) -> list[Path]:
        return sorted(self.folder.checkpoints.glob("step_*")) if self.folder.checkpoints.is_dir() else []

    def newest_checkpoint(self) -> Path:
        """Raises Broken if there is none."""
        if not (found := self.checkpoints()):
            raise Broken("there is no checkpoint")
        return found[-1]

    def wait(self, holds: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Raises Broken if the run ends meanwhile, or it is too late."""
        deadline = time.monotonic() + timeout_s
        while not holds():
            if self.has_ended():
                raise Broken(f"ended with {self.driver.process.returncode} before {what}: {tail(self.said())}")  # type: ignore[union-attr]
            if time.monotonic() > deadline:
                raise Broken(f"no {what} within {timeout_s:g} s")
            time.sleep(0.1)

    def wait_for(self, moment: float) -> None:
        """Until a time of the monotonic clock."""
        self.wait(lambda: time.monotonic() >= moment, max(0.0, moment - time.monotonic()) + 60, "next fault")

    def await_step(self, timeout_s: float, steps: int = 1) -> None:
        """Wait until so many more steps have been completed; a restart may take steps back meanwhile."""
        lowest = self.steps()

        def has_come() -> bool:
            nonlocal lowest
            lowest = min(lowest, now := self.steps())
            return now >= lowest + steps

        self.wait(has_come, timeout_s, "completed step")

    def end(self, hit: Hit, timeout_s: float = END_S) -> float:
        """Wait for the end that a fault is to bring; raises Broken if it is another, or too late.

        Returns:
            When the driver's process ended, by the monotonic clock.
        """
        assert self.driver is not None
        try:
            code = self.driver.process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise Broken(f"no end within {timeout_s:g} s") from error
        ended_at = time.monotonic()
        said = self.said()
        self.await_nothing_left()
        if code != hit.code or not re.search(hit.end or "", said):
            raise Broken(f"ended with {code}, not {hit.code} and {hit.end!r}: {tail(said)}")
        if "Traceback" in said:
            raise Broken(f"a traceback: {tail(said)}")
        return ended_at

    def await_success(self) -> None:
        """Raises Broken if the run does not end well."""
        self.end(Hit(what="", end="", code=0), timeout_s=START_S)

    def await_nothing_left(self) -> None:
        """Raises Broken if processes of a driver that has ended are there for longer than they may be."""
        assert self.driver is not None
        left = [*self.driver.left(LEFT_S), *self.nodes.left(*OURS, timeout_s=LEFT_S)]
        if left:
            raise Broken(f"processes are left: {left}")

    def kill(self) -> None:
        """End the driver, and what it leaves on the nodes, whatever they are at."""
        if self.driver is not None:
            self.driver.close()
        for text in OURS:
            for process in self.nodes.running(text):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        if self.driver is not None:
            self.said()

    def preempt(self) -> None:
        """Raises Broken if the run does not end as one that is preempted."""
        self.process.send_signal(signal.SIGUSR1)
        self.end(Hit(what="", end="preempted by SIGUSR1", code=75))

    def close(self) -> None:
        """End all of it; what fails does not keep the rest from its end."""
        self._opened.close()


def execute(*command: str) -> None:
    """Raises Broken if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Broken(f"{' '.join(command)}: {done.stderr.strip()}")


def tail(text: str) -> str:
    return " | ".join(text.strip().splitlines()[-6:])[-900:]
