"""Time of each phase of a GSPO step of fixed work, repeated, with real servers and trainers.

It runs `slimrl train` on the recipe of the calculator task with the settings of `overrides`. The first step is a
warm-up and is not counted. docs/internals.md says why every step has the same work.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from figures import make_table, write_figures
from rich.console import Console
from slimrl_tools.toy.calculator_data import write_calculator_data
from slimrl_tools.toy.toy import ToySize, write_toy

from slimrl.base.errors import RunError
from slimrl.base.seeds import derive_seed
from slimrl.data.prompt import Prompt
from slimrl.data.prompts import read_prompts
from slimrl.data.trajectory import Trajectory
from slimrl.observability.metrics import read_metrics
from slimrl.rewards.scoring import Score
from slimrl.runtime import commands

RECIPE = Path(__file__).parents[1] / "recipes" / "tiny_moe" / "gspo_calculator.yaml"
PROMPTS, SAMPLES, NEW_TOKENS = 16, 8, 48
PHASES = {
    "total": "time/step_s",
    "rollout": "time/rollout_s",
    "logprobs": "time/logprobs_s",
    "training": "time/train_s",
    "resync": "time/resync_s",
}
"""Phase -> its metric"""


def reward(trajectory: Trajectory, prompt: Prompt) -> float:
    """Between 0 and 1, fixed by the trajectory's id and never equal within a group."""
    return derive_seed(0, "reward", trajectory.trajectory_id) % 1_000_003 / 1_000_003


def counted_reward(trajectory: Trajectory, prompt: Prompt) -> Score:
    """The same reward; the metric `reward/parts/tokens` is the mean of the trajectories' tokens, prompts included."""
    return Score(reward=reward(trajectory, prompt), parts={"tokens": float(trajectory.num_tokens)})


def overrides(checkpoint: Path, prompts: Path, folder: Path, repeats: int) -> list[str]:
    """Settings of the benchmark over the recipe."""
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


def write_work(folder: Path, checkpoint: Path | None, prompts: Path | None) -> tuple[Path, Path]:
    """The model and a file of the prompts, written into the folder where None is given.

    Raises:
        ValueError: fewer prompts than a step takes.
    """
    if checkpoint is None:
        checkpoint = folder / "toy"
        write_toy("qwen3_moe", checkpoint, ToySize(), seed=0)
    if prompts is None:
        write_calculator_data(folder / "data", seed=0, num_train=PROMPTS, num_heldout=1, num_conversations=1)
        prompts = folder / "data" / "train.jsonl"
    if len(read_prompts(prompts)) < PROMPTS:
        raise ValueError(f"{prompts}: {PROMPTS} prompts are needed.")
    chosen = folder / "prompts.jsonl"
    lines = [line for line in prompts.read_text().splitlines() if line.strip()]
    chosen.write_text("\n".join(lines[:PROMPTS]) + "\n")
    return checkpoint.absolute(), chosen


def measure(
    checkpoint: Path | None, prompts: Path | None, repeats: int, extra: list[str]
) -> tuple[list[dict], list[str]]:
    """Metrics of the counted steps, and the settings.

    Args:
        checkpoint: None for the toy.
        prompts: None for the calculator task.

    Raises:
        ValueError: fewer prompts than a step takes, or the recipe is refused.
        RunError: the run failed, or a step did not do the fixed work.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = [*overrides(*write_work(folder, checkpoint, prompts), folder, repeats), *extra]
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
    title = f"{PROMPTS} prompts x {SAMPLES} samples x {NEW_TOKENS} tokens, {repeats} steps"
    table = make_table(title, ("phase", "median s", "min s", "max s", "of the total"))
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
    work = {"prompts": PROMPTS, "samples": SAMPLES, "new_tokens": NEW_TOKENS, "repeats": options.repeats}
    report = {**figures, "work": work, "recipe": RECIPE.name, "overrides": settings, "steps": steps}
    write_figures(options.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
