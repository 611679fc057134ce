"""An asynchronous run to which faults happen at random times, and whether it lost anything by them.

1. A small toy learns by imitation to call the calculator.
2. `slimrl train` trains it with `rollout.mode=async`, short deadlines and faulty_calculator.py as its tool, and other
   settings that are given.
3. At random times, which follow from the seed, one of FAULTS happens, each kind about as often.
4. The run is ended by SIGUSR1, and its files are checked (fault_ledger.py). What is left of its processes and of its
   files in /dev/shm is counted.

The exit code is 1 if anything was found.
"""

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from fault_ledger import Ledger
from faulty_calculator import FAILS, FOLDER, SLOW
from figures import make_table, write_figures
from rich.console import Console

from slimrl.base.processes import await_end
from slimrl.observability.metrics import read_metrics
from slimrl.observability.run_folder import RunFolder

RECIPES = Path(__file__).parents[1] / "recipes" / "tiny_moe"
SHARED_MEMORY_DIR = Path("/dev/shm")
ENGINE = "slimrl.engines.plugin.launch"
"""In the command line of an engine's server"""
WORKER = "sglang::scheduler"
"""The title of the process of an engine that computes"""
BATCH, MAX_STALENESS, CHUNK_TOKENS = 8, 2, 16
SETTINGS = (
    "rollout.mode=async", f"rollout.max_staleness={MAX_STALENESS}", f"rollout.prompts_per_step={BATCH}",
    "rollout.samples_per_prompt=4", f"rollout.chunk_tokens={CHUNK_TOKENS}", "algorithm.correction.level=token",
    "agent.tools=[faulty_calculator:calculator]", "rollout.tool_timeout_s=3", "rollout.request_timeout_s=60",
    "rollout.trajectory_timeout_s=90", "rollout.health_timeout_s=5", "resync.timeout_s=15", "resync.verify=full",
    "rollout.max_replacements=1000", "rollout.max_failed_fraction=1", "rollout.max_concurrency_per_engine=16",
    "trainer.num_ranks=1", "trainer.parallel.expert=1", "checkpoint.every_steps=20", "checkpoint.keep=1",
    "eval.every_steps=0", "eval.at_start=false", "eval.at_end=false", "tracking.wandb=disabled", "steps=100000",
)  # fmt: skip
START_S, END_S = 900.0, 300.0
"""Deadlines of the run's first step, and of its end."""
PAUSE_S = 10.0
"""For which a tool or the trainer is at fault."""


@dataclass(eq=False)
class FaultyRun:
    """A run under way, and what is done to it."""

    process: psutil.Popen
    tools: Path
    """Folder of the tool's files"""
    rng: random.Random
    family: set[psutil.Process] = field(default_factory=set)
    """All of its processes so far"""

    def look(self) -> None:
        """Note the processes that are there."""
        with suppress(psutil.NoSuchProcess):
            self.family |= {*self.process.children(recursive=True)}

    def members(self, text: str) -> list[psutil.Process]:
        """Processes with this text in their command lines."""
        self.look()
        found = []
        for process in self.family:
            with suppress(psutil.NoSuchProcess):
                if process.is_running() and text in " ".join(process.cmdline()):
                    found.append(process)
        return sorted(found, key=lambda process: process.pid)

    def signal_engine(self, number: signal.Signals) -> str:
        """A signal for all processes of one engine, which may be starting; returns its name."""
        servers = [one for one in self.members(ENGINE) if os.getsid(one.pid) == one.pid]
        server = self.rng.choice(servers)
        name = Path(f"/proc/{server.pid}/fd/2").resolve().stem
        for process in (server, *server.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        return name

    def kill_worker(self) -> str:
        """SIGKILL for the process of an engine that computes."""
        worker = self.rng.choice(self.members(WORKER))
        worker.kill()
        return f"process {worker.pid}"

    def kill_actor(self) -> str:
        actor = self.rng.choice(self.members("ray::EngineActor"))
        actor.kill()
        return f"process {actor.pid}"

    def stop_trainer(self) -> str:
        """Groups end and nobody takes them, until no other may begin."""
        for process in (found := self.members("ray::TrainerActor")):
            process.suspend()
        time.sleep(PAUSE_S)
        for process in found:
            process.resume()
        return f"{PAUSE_S:g} s"

    def break_tool(self, how: str) -> str:
        file = self.tools / how
        file.touch()
        time.sleep(PAUSE_S)
        file.unlink()
        return f"{PAUSE_S:g} s"


FAULTS: dict[str, Callable[[FaultyRun], str]] = {
    "engine killed": lambda run: run.signal_engine(signal.SIGKILL),
    "engine stopped": lambda run: run.signal_engine(signal.SIGSTOP),
    "engine's worker killed": FaultyRun.kill_worker,
    "engine's actor killed": FaultyRun.kill_actor,
    "slow tools": lambda run: run.break_tool(SLOW),
    "failing tools": lambda run: run.break_tool(FAILS),
    "full queue": FaultyRun.stop_trainer,
}
"""Each returns what it happened to."""


def prepare(folder: Path, updates: int) -> Path:
    """The model that calls the tool, and the data, unless they are there."""
    start, data, model = folder / "start", folder / "data", folder / "random"
    if start.is_dir():
        return start
    if not data.is_dir():
        _run("slimrl_tools.cli", "calculator-data", str(data), "--num-heldout", "8")
    if not model.is_dir():
        sizes = ["--hidden", "64", "--moe-intermediate", "64", "--layers", "2"]
        _run("slimrl_tools.cli", "toy", "qwen3_moe", str(model), *sizes)
    settings = [
        f"steps={updates}", f"model.path={model}", f"data.train={data / 'sft.jsonl'}", "run.name=sft",
        f"run.dir={folder / 'runs'}", "tracking.wandb=disabled", "trainer.num_ranks=1", "trainer.parallel.expert=1",
        f"trainer.optimizer.warmup_updates={min(20, updates - 1)}",
    ]  # fmt: skip
    _run("slimrl.cli", "sft", str(RECIPES / "sft.yaml"), *settings, "--overwrite")
    (folder / "runs" / "sft" / "export" / "hf").rename(start)
    return start


def _run(module: str, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", module, *arguments], check=True)


@contextmanager
def run_of(folder: Path, start: Path, extra: list[str], rng: random.Random) -> Iterator[FaultyRun]:
    """A training run, whose processes are all ended afterwards."""
    tools = folder / "tools"
    shutil.rmtree(tools, ignore_errors=True)
    tools.mkdir()
    search_path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    settings = [
        f"run.dir={folder / 'runs'}", "run.name=faults", f"model.path={start}",
        f"data.train={folder / 'data' / 'train.jsonl'}", f"data.eval.heldout={folder / 'data' / 'heldout.jsonl'}",
    ]  # fmt: skip
    with (folder / "faults.log").open("w") as log:
        process = psutil.Popen(
            [
                sys.executable, "-m", "slimrl.cli", "train", str(RECIPES / "gspo_calculator.yaml"),
                *settings, *SETTINGS, *extra,
            ],
            env={**os.environ, "PYTHONPATH": search_path, FOLDER: str(tools)},
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    run = FaultyRun(process, tools, rng)
    run.family.add(psutil.Process(process.pid))
    try:
        yield run
    finally:
        run.look()
        for member in run.family:
            with suppress(psutil.NoSuchProcess):
                member.kill()


def wait(run: FaultyRun, holds: Callable[[], bool], timeout_s: float) -> None:
    """Raises RuntimeError if the run ends or it is too late."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        run.look()
        if run.process.poll() is not None:
            raise RuntimeError(f"the run has ended with exit code {run.process.returncode}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"not within {timeout_s:g} s")
        time.sleep(0.5)


def wait_for(run: FaultyRun, moment: float) -> None:
    """Until a time of the monotonic clock; raises RuntimeError if the run ends before."""
    wait(run, lambda: time.monotonic() >= moment, timeout_s=moment - time.monotonic() + 60)


def num_steps(folder: RunFolder) -> int:
    return folder.metrics.read_text().count("\n") - 1 if folder.metrics.is_file() else 0


def left_of(run: FaultyRun) -> tuple[list[str], list[str]]:
    """Processes and files in /dev/shm of a run that has ended."""
    processes = []
    for process in await_end(run.family, 30):
        with suppress(psutil.NoSuchProcess):
            processes.append(f"{process.pid} {' '.join(process.cmdline())[:150]}")
    pids = {str(process.pid) for process in run.family}
    files = [path.name for path in SHARED_MEMORY_DIR.iterdir() if pids & set(re.findall(r"\d+", path.name))]
    return processes, files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/faults"), help="of the model and the run")
    parser.add_argument("--minutes", type=float, default=15.0, help="in which the faults happen")
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--kind", action="append", choices=list(FAULTS), help="kinds of faults (all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sft-updates", type=int, default=300)
    parser.add_argument("--json", type=Path)
    parser.add_argument("settings", nargs="*", help="further settings of the run")
    options = parser.parse_args()
    rng, folder = random.Random(options.seed), options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    start = prepare(folder, options.sft_updates)
    kinds = options.kind or list(FAULTS)
    planned = [kinds[number % len(kinds)] for number in range(options.faults)]
    rng.shuffle(planned)
    times_s = sorted(rng.uniform(0, 60 * options.minutes) for _ in planned)
    run_folder = RunFolder(folder / "runs" / "faults")
    shutil.rmtree(run_folder.path, ignore_errors=True)
    with run_of(folder, start, options.settings, rng) as run:
        wait(run, lambda: num_steps(run_folder) >= 1, START_S)
        begun = time.monotonic()
        for at_s, kind in zip(times_s, planned, strict=True):
            # A fault that takes a while may put the next one off.
            wait_for(run, begun + at_s)
            print(f"{time.monotonic() - begun:6.1f} s, {num_steps(run_folder)} steps: {kind}: {FAULTS[kind](run)}")
        wait_for(run, begun + 60 * options.minutes)
        steps = num_steps(run_folder)
        wait(run, lambda: num_steps(run_folder) > steps, START_S)
        seconds = time.monotonic() - begun
        run.process.send_signal(signal.SIGUSR1)
        code = run.process.wait(END_S)
        processes, files = left_of(run)
    ledger = Ledger.read(run_folder)
    problems = ledger.problems(batch=BATCH, max_staleness=MAX_STALENESS)
    if code != 75:
        problems.append(f"exit code {code}")
    problems += [f"left: {name}" for name in (*processes, *files)]
    log = run_folder.log_file("driver").read_text()
    metrics = read_metrics(run_folder.metrics)
    figures = {
        "seconds": seconds,
        "faults": dict(Counter(planned)),
        "steps": len(ledger.metrics),
        "replaced_engines": sum(line["resync/replaced_engines"] for line in metrics),
        "groups": dict(ledger.ends),
        "present_groups": len(ledger.present),
        "repeated_requests": sum(line.get("rollout/retries", 0) for line in metrics),
        "sampled_tokens": sum(line.get("rollout/tokens", 0) for line in metrics),
        "age_max": max(line["async/age_max"] for line in ledger.metrics),
        "extra_resyncs": log.count("resync of version") - len(metrics),
        "problems": problems,
    }
    write_figures(options.json, figures)
    table = make_table(f"{len(planned)} faults in {seconds:.0f} s, seed {options.seed}", ("what", "count"))
    for name, value in {**figures.pop("faults"), **figures.pop("groups"), **figures}.items():
        table.add_row(name, str(value))
    Console(width=120).print(table)
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
