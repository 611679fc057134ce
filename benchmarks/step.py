"""One GSPO step of fixed work through the real servers and trainers, repeated, with the time of each phase.

It is `slimrl train` on the recipe of the calculator task (two engines behind the router, two trainer ranks with expert
parallelism), with these changes:

1. The model is the toy and the prompts are the calculator task's, where no others are given.
2. 16 prompts, the same at every step, of 8 samples each; one turn, which goes on for exactly 48 tokens whatever comes.
3. Rewards are drawn from the trajectory's name, so that every group has a signal and all 128 trajectories are trained
   on, in one optimizer update.
4. No evaluation. The first step is a warm-up and is not counted.

Reported are the metrics time/*_s of the counted steps: total (the whole step), rollout, logprobs, training and resync.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table
from slimrl_tools.calculator_data import write_calculator_data
from slimrl_tools.toy import ToySize, write_toy

from slimrl.data.prompts import read_prompts
from slimrl.data.seeds import derive_seed
from slimrl.data.trajectory import Prompt, Trajectory
from slimrl.observability.metrics import read_metrics
from slimrl.runtime import commands
from slimrl.runtime.errors import RunError

RECIPE = Path(__file__).parents[1] / "recipes" / "tiny_moe" / "gspo_calculator.yaml"
PROMPTS, SAMPLES, NEW_TOKENS = 16, 8, 48
PHASES = {
    "total": "time/step_s",
    "rollout": "time/rollout_s",
    "logprobs": "time/logprobs_s",
    "training": "time/train_s",
    "resync": "time/resync_s",
}
"""Phase -> the metric that it is read from"""


def reward(trajectory: Trajectory, prompt: Prompt) -> float:
    """Between 0 and 1, fixed by the trajectory's id and never equal within a group."""
    return derive_seed(0, "reward", trajectory.trajectory_id) % 1_000_003 / 1_000_003


def overrides(checkpoint: Path, prompts: Path, folder: Path, repeats: int) -> list[str]:
    """What the benchmark lays over the recipe."""
    return [
        f"steps={repeats + 1}",
        f"model.path={checkpoint}",
        f"run.dir={folder}",
        "run.name=step",
        f"data.train={prompts}",
        f"data.eval.heldout={prompts}",
        "data.shuffle=false",
        "eval.every_steps=0",
        "eval.at_start=false",
        "eval.at_end=false",
        f"reward.function={Path(__file__).stem}:reward",
        f"rollout.prompts_per_step={PROMPTS}",
        f"rollout.samples_per_prompt={SAMPLES}",
        "rollout.max_turns=1",
        f"rollout.sampling.max_new_tokens={NEW_TOKENS}",
        "rollout.sampling.ignore_end_of_turn=true",
        "trainer.updates_per_rollout=1",
        "tracking.wandb=disabled",
    ]


def measure(
    checkpoint: Path | None, prompts: Path | None, repeats: int, extra: list[str]
) -> tuple[list[dict], list[str]]:
    """Metrics of the counted steps, and the settings.

    Args:
        checkpoint: None for the toy.
        prompts: None for those of the calculator task.

    Raises:
        ValueError: fewer prompts than a step takes, or something that the recipe's checks refuse.
        RunError: the run failed, or a step did not do the fixed work.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if checkpoint is None:
            checkpoint = folder / "toy"
            write_toy("qwen3_moe", checkpoint, ToySize(), seed=0)
        if prompts is None:
            write_calculator_data(folder / "data", seed=0, num_train=PROMPTS, num_heldout=1, num_conversations=1)
            prompts = folder / "data" / "train.jsonl"
        lines = prompts.read_text().splitlines()
        if len(read_prompts(prompts)) < PROMPTS:
            raise ValueError(f"{prompts}: {PROMPTS} prompts are needed.")
        chosen = folder / "prompts.jsonl"
        chosen.write_text("\n".join([line for line in lines if line.strip()][:PROMPTS]) + "\n")
        settings = [*overrides(checkpoint.absolute(), chosen, folder, repeats), *extra]
        commands.train(RECIPE, settings, resume=False, overwrite=False, job=None, checkpoint_log=None, ray_address=None)
        steps = [step for step in read_metrics(folder / "step" / "metrics.jsonl") if step["step"] > 1]
    for step in steps:
        if step["rollout/tokens"] != PROMPTS * SAMPLES * NEW_TOKENS or step["rollout/zero_variance_fraction"]:
            raise RunError(f"step {step['step']} sampled {step['rollout/tokens']} tokens; the work is not fixed")
    return steps, settings


def summarize(steps: list[dict]) -> dict[str, dict[str, float]]:
    """`<phase>_s` -> its median, smallest and largest over the steps."""
    figures = {}
    for phase, metric in PHASES.items():
        values = [step[metric] for step in steps]
        figures[f"{phase}_s"] = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return figures


def print_table(figures: dict[str, dict[str, float]], repeats: int) -> None:
    tokens = PROMPTS * SAMPLES * NEW_TOKENS
    table = Table(title=f"{PROMPTS} prompts x {SAMPLES} samples x {NEW_TOKENS} tokens, {repeats} steps")
    for column in ("phase", "median s", "min s", "max s", "of the total"):
        table.add_column(column, justify="left" if column == "phase" else "right")
    for phase in PHASES:
        row = figures[f"{phase}_s"]
        share = row["median"] / figures["total_s"]["median"]
        table.add_row(phase, *(f"{row[name]:.3f}" for name in ("median", "min", "max")), f"{share:.0%}")
    console = Console()
    console.print(table)
    rollout = tokens / figures["rollout_s"]["median"]
    console.print(f"{tokens / figures['total_s']['median']:.0f} sampled tokens/s, {rollout:.0f} within the rollout")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, help="a checkpoint instead of the toy")
    parser.add_argument("--prompts", type=Path, help="a prompt file (JSONL); its first 16 are taken")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings laid over the recipe")
    parser.add_argument("--repeats", type=int, default=5, help="counted steps")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    try:
        if options.repeats < 1:
            raise ValueError(f"--repeats {options.repeats}: at least 1.")
        steps, settings = measure(options.model, options.prompts, options.repeats, options.overrides)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    except RunError as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    figures = summarize(steps)
    print_table(figures, options.repeats)
    if options.json is not None:
        machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "system": platform.platform()}
        work = {"prompts": PROMPTS, "samples": SAMPLES, "new_tokens": NEW_TOKENS, "repeats": options.repeats}
        report = {**figures, "work": work, "recipe": RECIPE.name, "overrides": settings, "machine": machine}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({**report, "steps": steps}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
