"""Isolated runs per second: forks of the warm interpreter, `python -c` in bubblewrap, and a plain process, in turn.

Each way runs the same snippet of ten lines, by as many workers as are asked for. A warm run has numpy and sympy at
hand; the others import neither. Rounds alternate between the ways, so that other load on the machine meets all of them;
that load is reported too. Latency is from the call to the result.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from figures import make_table, write_figures
from rich.console import Console

from slimrl.agent.sandbox import visible
from slimrl.agent.sandbox.bubblewrap import BubblewrapSandbox
from slimrl.agent.sandbox.interface import Program
from slimrl.agent.sandbox.process import Command, run_command
from slimrl.config.schema.agent import SandboxConfig, SandboxLimits

SNIPPET = """import math
def roots(n):
    return sum(math.sqrt(i) for i in range(n))
values = []
for i in range(10):
    values.append(roots(i))
words = sorted("the quick brown fox jumps".split())
lengths = {word: len(word) for word in words}
print(lengths)
print(round(sum(values), 3))
"""
LIMITS = SandboxLimits(wall_s=30.0)
ANSWER = subprocess.run([sys.executable, "-c", SNIPPET], capture_output=True, text=True, check=True, timeout=60).stdout
ROUNDS = 5


def commands() -> dict[str, list[str]]:
    python = [str(visible.interpreter()), "-I", "-S", "-c", SNIPPET]
    shown = [*visible.arguments([]), "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    return {"bubblewrap": ["bwrap", "--unshare-all", *shown, *python], "process": python}


async def measure(run: Callable[[], Awaitable[str]], num_runs: int, workers: int) -> tuple[float, list[float]]:
    """Seconds of all runs together, and of each."""
    latencies: list[float] = []

    async def work(number: int) -> None:
        for _ in range(number, num_runs, workers):
            start = time.perf_counter()
            assert await run() == ANSWER
            latencies.append(time.perf_counter() - start)

    start = time.perf_counter()
    await asyncio.gather(*(work(number) for number in range(workers)))
    return time.perf_counter() - start, latencies


async def compare(num_runs: int, workers: int) -> dict[str, dict[str, float]]:
    """Way -> runs per second and latencies in milliseconds."""
    box = BubblewrapSandbox(SandboxConfig(limits=LIMITS))

    async def warm() -> str:
        return (await box.run(Program(code=SNIPPET))).stdout

    async def command(argv: list[str]) -> str:
        return (await run_command(Command(argv=argv), LIMITS)).stdout

    ways: dict[str, Callable[[], Awaitable[str]]] = {"warm": warm}
    for name, argv in commands().items():
        ways[name] = lambda argv=argv: command(argv)  # type: ignore[misc]
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    latencies: dict[str, list[float]] = {name: [] for name in ways}
    try:
        for run in ways.values():
            await run()
        for _ in range(ROUNDS):
            for name, run in ways.items():
                elapsed, each = await measure(run, max(1, num_runs // ROUNDS), workers)
                seconds[name].append(elapsed)
                latencies[name] += each
    finally:
        await box.close()
    figures = {}
    for name in ways:
        ordered = sorted(1000 * value for value in latencies[name])
        figures[name] = {
            "runs_per_s": len(ordered) / sum(seconds[name]),
            "median_ms": statistics.median(ordered),
            "p99_ms": ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)],
        }
    return figures


def print_table(figures: dict[str, dict[str, float]], workers: int, load: float) -> None:
    table = make_table(
        f"{workers} runs at a time, load {load:.1f} before",
        ("way", "runs/s", "median ms", "p99 ms", "warm is faster by"),
    )
    for name, row in figures.items():
        ratio = figures["warm"]["runs_per_s"] / row["runs_per_s"]
        table.add_row(
            name, f"{row['runs_per_s']:.0f}", f"{row['median_ms']:.1f}", f"{row['p99_ms']:.1f}", f"{ratio:.2f}"
        )
    Console().print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=1000, help="counted runs of each way")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="runs at the same time")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    if options.runs < 1 or options.workers < 1:
        print("--runs and --workers: at least 1.", file=sys.stderr)
        return 2
    load = os.getloadavg()[0]
    ways = asyncio.run(compare(options.runs, options.workers))
    print_table(ways, options.workers, load)
    report = {"runs": options.runs, "workers": options.workers, "load_before": load, "ways": ways}
    write_figures(options.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
