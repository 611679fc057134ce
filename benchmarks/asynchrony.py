"""Who waits for whom, compared on the calculator task with a slow tool: seconds for the same work, and accuracy.

1. Start, task and settings are those of benchmarks/algorithms.py, with GSPO; the tool is slow_calculator.py's.
2. Each case is one run of `slimrl train`: 24 steps of 16 groups of 8 trajectories, 3072 in all. Its seconds are those
   of its steps, without the evaluations, in which the tool answers at once.
3. The cases `staleness` have a fast tool and differ in how far the engines may be ahead, and in whether the loss
   corrects for it.

It continues as that benchmark does.
"""

import os
from pathlib import Path

from algorithms import SEQUENCE_LR, Bench, Case, draw, parser_of, table_of
from figures import make_table
from rich.console import Console

SLOW = (
    "agent.tools=[slow_calculator:calculator]",
    "rollout.tool_timeout_s=120",
    "rollout.max_concurrency_per_engine=128",
)
CORRECTED = ("algorithm.correction.level=token", "algorithm.correction.high=2")
STALENESS = (0, 1, 4, 8)


def case(*settings: str, panel: str, seeds: int = 1) -> Case:
    return Case(settings=(f"trainer.optimizer.lr={SEQUENCE_LR}", *settings), panel=panel, seeds=seeds)


def timed(*settings: str) -> Case:
    return case(*SLOW, *settings, panel="a slow tool", seeds=2)


def ahead(staleness: int, *settings: str) -> tuple[str, ...]:
    return ("rollout.mode=async", f"rollout.max_staleness={staleness}", *settings)


CASES = {
    "sync": timed(),
    "partial": timed("rollout.oversample=2", "rollout.max_staleness=4", "resync.pause=abort", *CORRECTED),
    "one_step_off": timed("rollout.mode=one_step_off", *CORRECTED),
    "async, staleness 1": timed(*ahead(1, *CORRECTED)),
    "async, staleness 4": timed(*ahead(4, *CORRECTED)),
    **{f"staleness {n}": case(*ahead(n), panel="not corrected") for n in STALENESS},
    **{f"staleness {n}, corrected": case(*ahead(n, *CORRECTED), panel="corrected") for n in STALENESS},
}


def print_table(bench: Bench) -> None:
    title = f"{bench.steps} steps; seconds without evaluations, mean of the seeds"
    table = make_table(title, ("case", "seeds", "seconds", "times sync", "area under the curve", "final"))
    seconds = {name: sum(run["seconds"] for run in runs.values()) / len(runs) for name, runs in bench.results.items()}
    for name, row in table_of(bench.results).items():
        ratio = (
            f"{seconds['sync'] / seconds[name]:.2f}" if CASES[name].panel == "a slow tool" and "sync" in seconds else ""
        )
        table.add_row(
            name, str(row["seeds"]), f"{seconds[name]:.0f}", ratio, f"{row['area']:.3f}", f"{row['final']:.3f}"
        )
    Console(width=120).print(table)


def main() -> None:
    options = parser_of(__doc__, CASES, seeds=2, steps=24).parse_args()
    # Runs import the slow tool from this folder.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    bench = Bench(options.folder, options.json, options.steps, options.settings, CASES)
    chosen = options.case or list(CASES)
    bench.prepare(options.sft_updates, options.problems, chosen)
    bench.measure_all(chosen, options.seeds, parallel=1)
    print_table(bench)
    if options.plot is not None:
        draw(bench.results, options.plot, CASES)


if __name__ == "__main__":
    main()
