"""Rounds of a race: TRL's steps, then slimrl's, again and again, and the table of their medians."""

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from figures import make_table, write_figures
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from sides import NUM_RANKS, Steps, make_venv, run_slimrl, run_trl
from slimrl_tools.toy.task_lines import SYSTEM_PROMPT
from step import PHASES, PROMPTS, SAMPLES, overrides

from slimrl.data.prompts import read_prompts

FAILURES = (OSError, ValueError, OmegaConfBaseException, subprocess.SubprocessError)
"""What a race may end in: wrong options, other work than expected, or a process that failed"""
WARMUP = 2
"""Steps of each run that are not counted: TRL compiles in them."""
SIDES: dict[str, dict[str, str]] = {
    "TRL": {"total": "total_s", "generation": "generation_s", "training": "training_s"},
    "slimrl": PHASES,
}
"""Phases of each side, and the key of their seconds in a step"""
GSPO = {
    "num_generations": SAMPLES,
    "per_device_train_batch_size": PROMPTS * SAMPLES // NUM_RANKS,
    "gradient_accumulation_steps": 1,
    "importance_sampling_level": "sequence",
    "loss_type": "grpo",
    "beta": 0.0,
    "epsilon": 3e-4,
    "epsilon_high": 4e-4,
    "learning_rate": 2e-4,
    "lr_scheduler_type": "constant",
    "weight_decay": 0.0,
    "router_aux_loss_coef": 0.0,
    "shuffle_dataset": False,
}
"""The recipe's algorithm and batch in TRL's words"""
LEAN = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "ddp_find_unused_parameters": False,
    "report_to": "none",
    "save_strategy": "no",
    "logging_strategy": "no",
    "disable_tqdm": True,
}
"""Nothing that costs time beside the step"""
Round = dict[str, Any]
"""`seconds`, `steps` and `load_before`, each by side"""
LAYOUT = ("trainer.parallel.expert=1", "trainer.max_tokens_per_rank=8192")
"""TRL's for slimrl: each of two processes has the whole model, and takes up to 8,192 tokens at once"""


@dataclass(frozen=True, kw_only=True)
class Race:
    """One piece of work, for both sides.

    Args:
        prompts: a prompt file with as many lines as a step takes.
        slimrl: settings over those of benchmarks/step.py and `LAYOUT`.
        trl: `config` (GRPOConfig), `model` (from_pretrained), and `compile` (CompileConfig) if generation compiles.
        tools: whether TRL gets the calculator.
        tokens, turns: that a step samples in the mean; None if only the sides are compared with each other.
        tolerance: largest relative difference from both, or between the sides.
        warmup: steps of each run that are not counted.
    """

    model: Path
    prompts: Path
    slimrl: Sequence[str]
    trl: Mapping[str, Any]
    tools: bool
    tokens: float | None
    turns: float | None
    tolerance: float
    warmup: int = WARMUP

    def run_trl(self, python: Path, repeats: int, changes: Sequence[str]) -> Steps:
        """Counted steps of TRL.

        Args:
            changes: `config.KEY=VALUE`, `model.KEY=VALUE` or `compile.KEY=VALUE`, over `trl`.
        """
        base = {"config": {**GSPO, **LEAN, "max_steps": self.warmup + repeats}, "model": {"dtype": "float32"}}
        settings = OmegaConf.merge(base, dict(self.trl), OmegaConf.from_dotlist(list(changes)))
        system = {"role": "system", "content": SYSTEM_PROMPT}
        work = {
            "settings": OmegaConf.to_container(settings),
            "checkpoint": str(self.model),
            "prompts": [[system, *prompt.messages] for prompt in read_prompts(self.prompts)],
            "tools": self.tools,
        }
        return self._checked(run_trl(python, work)[-repeats:])

    def run_slimrl(self, repeats: int, changes: Sequence[str]) -> Steps:
        """Counted steps of slimrl.

        Args:
            changes: settings of the recipe, over `slimrl`.
        """
        with TemporaryDirectory() as name:
            folder = Path(name)
            first = overrides(self.model.absolute(), self.prompts.absolute(), folder, repeats + self.warmup - 1)
            steps = run_slimrl(folder / "step", [*first, *LAYOUT, *self.slimrl, *changes])[-repeats:]
        return self._checked(
            [
                {
                    **step,
                    "tokens": step["rollout/tokens"],
                    "turns": step["rollout/trajectories"] * step["rollout/turns_mean"],
                }
                for step in steps
            ]
        )

    def _checked(self, steps: Steps) -> Steps:
        """The same steps. Raises ValueError if they did other work."""
        for key, expected in (("tokens", self.tokens), ("turns", self.turns)):
            mean = statistics.mean(step[key] for step in steps)
            if expected is not None and abs(mean / expected - 1) > self.tolerance:
                raise ValueError(f"a step sampled {mean:.0f} {key}, not {expected:.0f}")
        return steps

    def compare_work(self, rounds: Sequence[Round]) -> None:
        """Raises ValueError if the steps of one side sampled more than those of the other."""
        sides = list(rounds[0]["steps"])
        for key in ("tokens", "turns"):
            means = [statistics.mean(step[key] for each in rounds for step in each["steps"][side]) for side in sides]
            if max(means) > (1 + self.tolerance) * min(means):
                found = " and ".join(f"{mean:.0f} of {side}" for side, mean in zip(sides, means, strict=True))
                raise ValueError(f"the sides sampled other numbers of {key} in a step: {found}")


def parser_of(description: str) -> argparse.ArgumentParser:
    """The options that races share."""
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings of slimrl, laid over the recipe")
    of_trl = "settings of TRL: config.KEY of GRPOConfig, model.KEY of from_pretrained, compile.KEY of CompileConfig"
    parser.add_argument("--trl", action="append", default=[], metavar="KEY=VALUE", help=of_trl)
    parser.add_argument("--side", action="append", choices=SIDES, help="run this one alone")
    parser.add_argument("--rounds", type=int, default=3, help="of both sides")
    parser.add_argument("--repeats", type=int, default=15, help="counted steps of a round")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench/race"), help="models and data")
    parser.add_argument("--venv", type=Path, default=Path("runs/bench/trl"), help="TRL's environment")
    parser.add_argument("--json", type=Path, help="write the figures there")
    return parser


def main_of(parser: argparse.ArgumentParser, title: str, prepare: Callable[[argparse.Namespace], Race]) -> int:
    """Run the race of a command line; returns the exit status.

    Args:
        prepare: makes what is not there yet in `options.folder`.
    """
    options = parsed(parser)
    try:
        race = prepare(options)
        rounds = [run_round(race, options) for _ in range(options.rounds)]
    except FAILURES as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    print_rounds(f"{title}; medians of {options.repeats} steps, in seconds", rounds)
    write_figures(options.json, summary_of(rounds))
    return 0


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options of the command line; ends the process if they are no options of a race."""
    options = parser.parse_intermixed_args()
    if options.rounds < 1 or options.repeats < 1:
        parser.error("--rounds and --repeats: at least 1")
    return options


def summary_of(rounds: Sequence[Round]) -> dict[str, Any]:
    """The rounds, `medians` of their seconds by side and phase, and `ratio_of` the medians."""
    seconds = [each["seconds"] for each in rounds]
    medians = {
        side: {phase: statistics.median(each[side][phase] for each in seconds) for phase in phases}
        for side, phases in seconds[0].items()
    }
    return {"rounds": list(rounds), "medians": medians, "ratio": ratio_of(medians)}


def ratio_of(seconds: Mapping[str, Mapping[str, float]]) -> float | None:
    """TRL's step over slimrl's; above 1, slimrl is faster."""
    return seconds["TRL"]["total"] / seconds["slimrl"]["total"] if len(seconds) == len(SIDES) else None


def run_round(race: Race, options: argparse.Namespace) -> Round:
    """One round: by side the steps, median seconds of the phases and the load average before them."""
    ways: dict[str, Callable[[], Steps]] = {
        "TRL": lambda: race.run_trl(make_venv(options.venv), options.repeats, options.trl),
        "slimrl": lambda: race.run_slimrl(options.repeats, options.settings),
    }
    made: Round = {"seconds": {}, "steps": {}, "load_before": {}}
    for side in options.side or SIDES:
        made["load_before"][side] = os.getloadavg()[0]
        made["steps"][side] = steps = ways[side]()
        made["seconds"][side] = {
            phase: statistics.median(step[key] for step in steps) for phase, key in SIDES[side].items()
        }
    return made


def print_rounds(title: str, rounds: Sequence[Round]) -> None:
    """A table of the seconds of each phase: a column for each round, and their medians."""
    columns = [*(each["seconds"] for each in rounds), summary_of(rounds)["medians"]]
    table = make_table(title, ("", *(f"round {number}" for number in range(1, len(columns))), "median"))
    for side in columns[0]:
        for phase in SIDES[side]:
            table.add_row(f"{side} {phase}", *(f"{seconds[side][phase]:.3f}" for seconds in columns))
    ratios = [ratio_of(seconds) for seconds in columns]
    table.add_row("TRL / slimrl", *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios))
    Console().print(table)
