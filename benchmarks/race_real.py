"""A GSPO step of slimrl beside one of TRL on a pretrained model, SmolLM2-135M-Instruct, which `make real-model` writes.

Three races of 16 prompts x 8 samples and one update each:

- a: answers as they come, of at most 256 tokens; a few are as long as ten others
- b: answers of exactly 96 tokens
- c: trajectories of 1 to 6 turns with the calculator, after a cold start that teaches the model to call it

Beside the seconds it shows tokens per second, the memory of all processes of a side, and which part of the processor's
operations and memory bandwidth, measured in the same run, a step takes (limits.py). The file of --json is written
after each round. docs/internals.md says what each side is given.
"""

import statistics
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from figures import make_table, write_figures
from limits import Processor, StepWork, sizes_of
from real_races import QUESTIONS, SFT_UPDATES, WatchedRace, fixed_answers, free_answers, with_calculator
from rich.console import Console
from rounds import FAILURES, SIDES, Round, parsed, parser_of, print_rounds, run_round, summary_of
from sides import NUM_RANKS, Steps
from step import SAMPLES

MODEL = Path("models/SmolLM2-135M-Instruct")
RACES: Mapping[str, tuple[str, Callable[[Namespace], WatchedRace], float]] = {
    "a": ("answers as they come", free_answers, 1.5),
    "b": ("answers of one length", fixed_answers, 1.0),
    "c": ("turns with the calculator", with_calculator, 3.0),
}
"""Name -> what it is, what makes it, and the goal for the ratio: TRL's seconds over slimrl's"""
GENERATION = {"TRL": "generation_s", "slimrl": "time/rollout_s"}
"""Side -> the key of a step's seconds of generation, tools included; all of the rest is training here"""
UNITS = {
    "generation_tokens_per_s": ("sampled tokens/s of generation", "{:.1f}"),
    "training_tokens_per_s": ("trained tokens/s of the rest of the step", "{:.1f}"),
    "training_of_peak": ("training, of the matrix-product peak", "{:.1%}"),
    "generation_of_peak": ("generation, of the matrix-product peak", "{:.1%}"),
    "decoding_of_bandwidth": ("generation, of the memory bandwidth", "{:.1%}"),
    "peak_gib": ("peak memory of all processes, GiB", "{:.2f}"),
}


def rates_of(model: Path, side: str, steps: Steps, prompts: int, processor: Processor) -> dict[str, float]:
    """The medians over the steps of a side of what UNITS describes; the memory is the most."""
    shape, parameters = sizes_of(model)
    found: list[dict[str, float]] = []
    for step in steps:
        work = StepWork(
            shape=shape,
            parameters=parameters,
            tokens=step["tokens"],
            sequence_tokens=step["sequence_tokens"],
            trajectories=prompts * SAMPLES,
            processes=NUM_RANKS,
        )
        generation_s = step[GENERATION[side]]
        training_s = step[SIDES[side]["total"]] - generation_s
        found.append(
            {
                "generation_tokens_per_s": work.tokens / generation_s,
                "training_tokens_per_s": work.sequence_tokens / training_s,
                "training_of_peak": work.training_flops / training_s / processor.flops_per_s,
                "generation_of_peak": work.generation_flops / generation_s / processor.flops_per_s,
                "decoding_of_bandwidth": work.decoding_bytes / generation_s / processor.bytes_per_s,
            }
        )
    medians = {name: statistics.median(rates[name] for rates in found) for name in found[0]}
    return {**medians, "peak_gib": max(step["peak_bytes"] for step in steps) / 1024**3}


def report_of(race: WatchedRace, rounds: Sequence[Round], options: Namespace, processor: Processor) -> dict[str, Any]:
    """`summary_of` the rounds, and `rates` by side."""
    sides = {side: [step for each in rounds for step in each["steps"][side]] for side in rounds[0]["steps"]}
    rates = {side: rates_of(race.model, side, steps, options.prompts, processor) for side, steps in sides.items()}
    return {**summary_of(rounds), "rates": rates}


def print_report(title: str, report: Mapping[str, Any], goal: float) -> None:
    print_rounds(title, report["rounds"])
    table = make_table("", ("", *report["rates"]))
    for key, (label, form) in UNITS.items():
        table.add_row(label, *(form.format(rates[key]) for rates in report["rates"].values()))
    console = Console()
    console.print(table)
    if report["ratio"] is not None:
        console.print(f"TRL / slimrl: {report['ratio']:.2f}; the goal is at least {goal:g}")


def run(options: Namespace) -> None:
    """The races one after the other.

    Raises:
        ValueError: no model, or a side did other work.
        OSError, SubprocessError: a side failed.
    """
    if not options.model.is_dir():
        raise ValueError(f"{options.model}: no such folder; `make real-model` writes it")
    reports: dict[str, Any] = {}
    for name in sorted(options.only or RACES):
        words, prepare, goal = RACES[name]
        race = prepare(options)
        rounds: list[Round] = []
        processor = Processor.measured(NUM_RANKS)
        for _ in range(options.rounds):
            rounds.append(run_round(race, options))
            reports[name] = report_of(race, rounds, options, processor)
            reports[name] |= {"goal": goal, "processor": asdict(processor)}
            write_figures(options.json, {"races": reports})
            race.compare_work(rounds)
        size = f"{options.prompts} prompts x {SAMPLES} samples"
        print_report(f"{name}: {words}; {size}; medians of {options.repeats} steps, seconds", reports[name], goal)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of the model")
    parser.add_argument("--only", action="append", choices=RACES, help="run this race alone")
    parser.add_argument("--prompts", type=int, default=len(QUESTIONS), help="prompts of a step")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="limit of an answer, and of a turn")
    parser.add_argument("--sft-updates", type=int, default=SFT_UPDATES, help="of the cold start")
    parser.add_argument("--tolerance", type=float, default=0.15, help="largest relative difference of the sides' work")
    parser.set_defaults(repeats=5, folder=Path("runs/bench/race/real"))
    options = parsed(parser)
    if not 1 <= options.prompts <= len(QUESTIONS):
        parser.error(f"--prompts: 1 to {len(QUESTIONS)}")
    try:
        run(options)
    except FAILURES as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
