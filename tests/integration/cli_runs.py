"""Runs of the `slimrl` command in a process of their own, on a tiny model, with every process that they start noted."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from slimrl_tools.toy.calculator_data import write_calculator_data
from slimrl_tools.toy.toy import ToySize, write_toy

from slimrl.base.processes import await_end
from slimrl.observability.metrics import read_metrics
from slimrl.observability.run_folder import RunFolder

RECIPES = Path(__file__).parents[2] / "recipes" / "tiny_moe"
ENGINE = "slimrl.engines.plugin.launch"
"""In the command line of an engine's server"""
SIZE = ToySize(layers=2, hidden=64, moe_intermediate=64)
"""0.3 million parameters."""

TIME_KEYS = ("time/", "resync/seconds", "rollout/tokens_per_s", "distill/score_s")
"""Metrics that follow the clock."""


@dataclass(frozen=True)
class Workspace:
    """A folder with a random tiny model in `model/` and a small calculator task in `data/`; runs go to `runs/`."""

    path: Path

    def overrides(self, *more: str) -> list[str]:
        """Overrides of the calculator recipe: few short trajectories of a model that cannot yet do anything."""
        data = self.path / "data"
        return [
            f"run.dir={self.path / 'runs'}",
            f"model.path={self.path / 'model'}",
            f"data.train={data / 'train.jsonl'}",
            f"data.eval.heldout={data / 'heldout.jsonl'}",
            "eval.every_steps=0",
            "eval.at_start=false",
            "eval.at_end=false",
            "rollout.prompts_per_step=4",
            "rollout.samples_per_prompt=4",
            "rollout.sampling.max_new_tokens=24",
            "rollout.eval_sampling.max_new_tokens=24",
            # The task's own reward is beyond a random model.
            "reward.function=toy_reward:low_tokens",
            "tracking.wandb=disabled",
            *more,
        ]

    def run_folder(self, name: str) -> RunFolder:
        return RunFolder(self.path / "runs" / name)


def make_workspace(path: Path, family: str = "qwen3_moe", size: ToySize = SIZE) -> Workspace:
    write_toy(family, path / "model", size, 0)
    write_calculator_data(path / "data", seed=0, num_train=32, num_heldout=8, num_conversations=64)
    return Workspace(path)


def steps_without_times(folder: RunFolder) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl as they must repeat."""
    return [
        {name: value for name, value in line.items() if not name.startswith(TIME_KEYS)}
        for line in read_metrics(folder.metrics)
    ]


def samples(folder: RunFolder) -> dict[str, bytes]:
    """The trajectories of each step, readable ones and those with tokens, which say too how many tokens of each an
    engine had cached."""
    return {path.name: path.read_bytes() for path in sorted(folder.trajectories.iterdir())}


def exported(folder: RunFolder) -> dict[str, bytes]:
    """The weight files of an export."""
    files = {path.name: path.read_bytes() for path in folder.export.glob("*.safetensors")}
    assert files
    return files


def num_logged_steps(folder: RunFolder) -> int:
    """Lines in metrics.jsonl so far, step 0 included."""
    return folder.metrics.read_text().count("\n") if folder.metrics.exists() else 0


def engine_server(processes: Iterable[psutil.Process], log: str) -> psutil.Process:
    """The main process of the engine, or of its part, that has a log of this name."""
    for process in processes:
        try:
            parent, output = process.parent(), Path(f"/proc/{process.pid}/fd/2").resolve()
            if parent is not None and "ray::" in " ".join(parent.cmdline()) and output.name == log:
                return process
        except (psutil.NoSuchProcess, OSError):
            continue
    raise AssertionError(f"no process writes {log}")


class CliRun:
    """`slimrl ARGUMENTS` under way, as the leader of a process group, like a command in a terminal."""

    def __init__(self, arguments: Sequence[str]) -> None:
        # The reward lies beside this file.
        search_path = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(search_path)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "slimrl.cli", *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.stdout, self.stderr = "", ""
        self.family: set[psutil.Process] = {psutil.Process(self.process.pid)}
        self._stop = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._reader.start()
        self._watcher.start()

    def _read(self) -> None:
        self.stdout, self.stderr = self.process.communicate()

    def _watch(self) -> None:
        """Note descendants, those of descendants too whose parent has gone."""
        while not self._stop.is_set():
            for member in list(self.family):
                try:
                    # A new set each time, since other threads go through the one that they have found.
                    self.family = self.family | set(member.children(recursive=True))
                except psutil.NoSuchProcess:
                    continue
            self._stop.wait(0.3)

    def wait(self, timeout_s: float) -> int:
        """The exit code; the processes that are left are for `left`."""
        code = self.process.wait(timeout_s)
        # Output ends when the last process that holds it does.
        self._reader.join(30)
        return code

    def wait_until(self, holds: Callable[[], bool], timeout_s: float, *, poll_s: float = 0.05) -> None:
        deadline = time.monotonic() + timeout_s
        while not holds():
            if self.process.poll() is not None:
                self._reader.join(30)
                raise AssertionError(f"ended with {self.process.returncode}: {self.stdout}\n{self.stderr}")
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {timeout_s} s: {holds}")
            time.sleep(poll_s)

    def members(self, text: str) -> list[psutil.Process]:
        """Living processes whose command line has `text`, the oldest first."""
        found = []
        for member in self.family:
            try:
                if member.is_running() and text in " ".join(member.cmdline()):
                    found.append((member.create_time(), member.pid, member))
            except psutil.NoSuchProcess:
                continue
        return [member for *_, member in sorted(found, key=lambda item: item[:2])]

    def kill_server(self, index: int) -> None:
        """SIGKILL for the main process of an engine; its children end with it."""
        engine_server(self.members(ENGINE), f"engine_{index}.log").kill()

    def signal_server(self, index: int, number: signal.Signals) -> None:
        """A signal for all processes of an engine's server."""
        for process in self.server_processes(index):
            process.send_signal(number)

    def server_processes(self, index: int) -> list[psutil.Process]:
        """All processes of an engine's server. Raises AssertionError if it has none."""
        server = engine_server(self.members(ENGINE), f"engine_{index}.log")
        return [server, *server.children(recursive=True)]

    def interrupt_as_terminal(self) -> None:
        """What Ctrl-C does: SIGINT to every process of the foreground group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def left(self, timeout_s: float = 60.0) -> list[str]:
        """Command lines of processes of the run that still live after the deadline; the run has ended."""
        time.sleep(0.5)
        lines = []
        for process in await_end(self.family, timeout_s):
            with suppress(psutil.NoSuchProcess):
                lines.append(f"{process.pid} {' '.join(process.cmdline())[:150]}")
        return lines

    def close(self) -> None:
        """End what is left, so that no test's processes outlive it."""
        self._stop.set()
        self._watcher.join(10)
        for process in self.family:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue


def run_cli(*arguments: str, timeout_s: float) -> CliRun:
    """A run that has ended; its exit code is `.process.returncode`."""
    run = CliRun(arguments)
    try:
        run.wait(timeout_s)
        assert not run.left(), f"left: {run.left(0)}"
    finally:
        run.close()
    return run


def succeed(*arguments: str, timeout_s: float) -> CliRun:
    """A run that has to end well, leaving no process."""
    run = run_cli(*arguments, timeout_s=timeout_s)
    assert run.process.returncode == 0, f"{run.stdout}\n{run.stderr}"
    return run


def end_when_joined(run: CliRun, folder: RunFolder, timeout_s: float = 500.0) -> list[dict[str, Any]]:
    """Wait until both engines get weights again and have served with them, and end the run; the lines of its steps."""
    log = folder.log_file("driver")

    def have_joined() -> bool:
        # Of two where one is lost in a resync, of one where that is known before.
        _, *later = re.split(" 1 of [12] engines", log.read_text())
        return bool(later) and later[-1].count(" 2 of 2 engines") >= 2

    run.wait_until(have_joined, timeout_s, poll_s=0.5)
    run.process.send_signal(signal.SIGUSR1)
    assert run.wait(timeout_s) == 75, run.stderr
    assert run.left() == []
    lines = read_metrics(folder.metrics)
    assert sum(line["resync/replaced_engines"] for line in lines) == 1
    assert [line["resync/version"] for line in lines] == list(range(len(lines)))
    assert {line["resync/fingerprint_mismatches"] for line in lines} == {0}
    # The other engine has taken its sessions over.
    assert {line["rollout/failed_fraction"] + line["rollout/aborted_fraction"] for line in lines[1:]} == {0}
    return lines
