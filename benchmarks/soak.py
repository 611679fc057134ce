"""Whether a long run grows: memory, descriptors, threads, shared memory, disk and seconds of a step over the hours.

1. A toy learns by imitation to write programs (`agent_tasks.py python`).
2. `slimrl train` trains it for as long as asked, its agents writing programs that the sandbox runs, with a learning
   rate so small that its answers get neither longer nor shorter.
3. Every few seconds what the run's processes hold is noted, by kind of process. The run is ended by SIGUSR1.
4. Of each figure the slope over time is estimated, without the first part of the run, with an interval for all figures
   together: with a confidence of 95% not one of them is wrong.

The exit code is 1 if a slope is not 0 and no cause is known for it.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from agent_tasks import RECIPES, TASKS, prepare
from figures import make_table, write_figures
from held import by_file, bytes_of, held_by, lasting, shared_memory_bytes
from rich.console import Console
from slopes import Slope, slope_of

from slimrl.base.processes import await_end, send_all
from slimrl.launch.slurm import PREEMPTED
from slimrl.observability.metrics import read_metrics
from slimrl.observability.run_folder import RunFolder

TASK = "python"
SETTINGS = (
    "run.name=soak", "steps=1000000", "trainer.optimizer.lr=1e-7", "trainer.optimizer.min_lr=1e-7",
    "rollout.prompts_per_step=4", "rollout.samples_per_prompt=4", "algorithm.skip_zero_variance=false",
    "checkpoint.every_steps=20", "checkpoint.keep=1", "eval.every_steps=100", "eval.at_start=false",
    "tracking.trajectories_per_step=1", "tracking.recorded_bytes=20000000",
)  # fmt: skip
CONFIDENCE = 0.95
LEFT_OUT = 0.1
"""Part of the time at the beginning that is not looked at: caches fill"""
Notes = dict[str, list[tuple[float, float]]]
"""By figure, hours since the first step and the values"""
START_S, END_S = 900.0, 300.0
"""Deadlines of the first step, and of the end"""
RUN_FILES, STEP_S = "run folder, MB", "step, s"
RAY = "Ray: memory, MB"
CAUSES = {
    RUN_FILES: "records of each step",
    # RAY_task_events_max_num_task_in_gcs; 4 kB each (measured).
    RAY: "its head keeps the events of the last 100,000 calls of actors",
}
"""Figures that are meant to grow, and why"""


def watch(settings: Sequence[str], folder: Path, minutes: float, every_s: float) -> Notes:
    """Train, and note what the run holds.

    Raises:
        RuntimeError: the run ends by itself, or is too late.
    """
    run = RunFolder(folder / "soak")
    shutil.rmtree(run.path, ignore_errors=True)
    notes: Notes = {}
    # Short: sockets lie in it.
    with tempfile.TemporaryDirectory(prefix="soak") as temporary, (folder / "soak.log").open("w") as log:
        process = psutil.Popen(
            [sys.executable, "-m", "slimrl.cli", "train", str(RECIPES / TASKS[TASK].recipe), *settings],
            env={**os.environ, "TMPDIR": temporary},
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        family = {psutil.Process(process.pid)}
        holders = {*family}
        try:
            _wait(process, lambda: num_steps(run) > 1, START_S)
            begun, times = time.monotonic(), list[float]()
            while (hours := (time.monotonic() - begun) / 3600) < minutes / 60:
                family |= {*process.children(recursive=True)}
                holders |= lasting(process)
                figures = {
                    **held_by(psutil.Process(process.pid)),
                    "/dev/shm, MB": shared_memory_bytes(holders) / 1e6,
                    "temporary files, MB": bytes_of(Path(temporary)) / 1e6,
                    RUN_FILES: bytes_of(run.path) / 1e6,
                }
                # A kind of process that is not there holds nothing; those before the first were none either.
                for name in {*notes, *figures}:
                    earlier = [(at, 0.0) for at in times]
                    notes.setdefault(name, earlier).append((hours, figures.get(name, 0.0)))
                times.append(hours)
                time.sleep(every_s)
                if process.poll() is not None:
                    raise RuntimeError(f"the run has ended with exit code {process.returncode}: {folder / 'soak.log'}")
            process.send_signal(signal.SIGUSR1)
            await_end([process], END_S)
            if (code := process.poll()) != PREEMPTED:
                raise RuntimeError(f"the run ended with exit code {code}, None if not yet: {folder / 'soak.log'}")
            if left := await_end(family, 30):
                raise RuntimeError(f"the run left processes: {left}")
        finally:
            send_all(family, signal.SIGKILL)
    notes[STEP_S] = step_seconds(run)
    return notes


def _wait(process: psutil.Popen, holds: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise RuntimeError(f"no step within {timeout_s:g} s, or exit code {process.poll()}")
        time.sleep(0.5)


def num_steps(run: RunFolder) -> int:
    return run.metrics.read_text().count("\n") if run.metrics.is_file() else 0


def step_seconds(run: RunFolder) -> list[tuple[float, float]]:
    """Hours since the first step, and seconds, of each step after it."""
    seconds = [line["time/step_s"] for line in read_metrics(run.metrics) if line["step"] > 1]
    return list(zip((total / 3600 for total in accumulate(seconds)), seconds, strict=True))


def slopes_of(notes: Notes) -> dict[str, Slope]:
    """The slope of each figure that changes at all, with intervals for all of them together (Bonferroni)."""
    late = {}
    for name, pairs in notes.items():
        begin = pairs[0][0] + LEFT_OUT * (pairs[-1][0] - pairs[0][0])
        late[name] = [pair for pair in pairs if pair[0] >= begin]
    changing = {name: pairs for name, pairs in late.items() if len({value for _, value in pairs}) > 1}
    confidence = 1 - (1 - CONFIDENCE) / max(1, len(changing))
    series = {name: np.transpose(pairs) for name, pairs in changing.items()}
    return {name: slope_of(hours, values, confidence) for name, (hours, values) in series.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/soak"), help="of the model and the run")
    parser.add_argument("--minutes", type=float, default=180.0, help="after the first step")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two looks")
    parser.add_argument("--sft-updates", type=int, default=TASKS[TASK].sft_updates, help="of the cold start")
    parser.add_argument("--problems", type=int, default=16, help="held-out questions")
    parser.add_argument("--json", type=Path)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="further settings of the run")
    options = parser.parse_intermixed_args()
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    counts = [TASKS[TASK].heldout_option, str(options.problems)]
    prepared = prepare(TASK, folder, 0, options.sft_updates, counts)
    # What ends the benchmark ends the run with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    try:
        notes = watch([*prepared, *SETTINGS, *options.settings], folder, options.minutes, options.every)
        write_figures(options.json, {"notes": notes})
        slopes = slopes_of(notes)
    except (RuntimeError, ValueError) as error:
        sys.exit(str(error))
    growing = [name for name, slope in slopes.items() if not slope.is_zero and name not in CAUSES]
    steps, run = num_steps(RunFolder(folder / "soak")), folder / "soak"
    table = make_table(f"{steps} steps in {options.minutes:g} minutes", ("figure", "mean", "slope an hour", "+-", ""))
    for name, slope in sorted(slopes.items()):
        said = "" if slope.is_zero else CAUSES.get(name, "grows" if slope.per_hour > 0 else "falls")
        table.add_row(name, f"{slope.mean:.4g}", f"{slope.per_hour:.3g}", f"{slope.half_width:.2g}", said)
    Console(width=120).print(table)
    constant = sorted(set(notes) - set(slopes))
    print(f"constant: {', '.join(constant)}")
    files = {name: size / 1000 / steps for name, size in by_file(run).items()}
    print(
        "kB a step in the run's folder:", ", ".join(f"{name} {size:.1f}" for name, size in files.items() if size >= 0.1)
    )
    figures: dict[str, Any] = {
        "minutes": options.minutes, "steps": steps, "growing": growing, "constant": constant,
        "kilobytes_a_step": files, "load": os.getloadavg()[1],
        "slopes": {
            name: {"mean": slope.mean, "per_hour": slope.per_hour, "half_width": slope.half_width}
            for name, slope in slopes.items()
        },
        "notes": notes,
    }  # fmt: skip
    write_figures(options.json, figures)
    sys.exit(bool(growing))


if __name__ == "__main__":
    main()
