"""GSPO and GRPO on a pretrained model, SmolLM2-135M-Instruct: held-out accuracy over the steps, from the same weights.

Each case is one run of recipes/smollm2/reasoning.yaml with 4 optimizer updates a step: with a single one every ratio is
1 and no algorithm clips. The cases differ in the algorithm's name alone, and so in the ratios that are clipped, of
sequences or of tokens: both have the recipe's learning rate, and its advantages that are not divided by the group's
deviation. The accuracy is that of the held-out questions of all three tasks together, answered greedily: of 200, with a
standard error of 0.035.

A run that was ended goes on from its checkpoint. One that is complete is not made again: take another --folder for
other settings.
"""

import argparse
from pathlib import Path
from typing import Any

from algorithms import Case, draw, print_table, run_python, run_tools
from figures import write_figures

from slimrl.observability.metrics import read_metrics
from slimrl.observability.run_folder import RunFolder

RECIPE = Path(__file__).parents[1] / "recipes" / "smollm2" / "reasoning.yaml"
MODEL = Path("models/SmolLM2-135M-Instruct")
UPDATES = 4
CASES = {name: Case(settings=(f"algorithm.name={name}",), panel="SmolLM2-135M-Instruct") for name in ("gspo", "grpo")}
TASKS = {
    "chain_sum": ("max_terms=2,max_digits=1", 140, 60),
    "products": ("max_digits=1", 60, 40),
    "gcd": ("max_value=30", 500, 100),
}
"""Task -> its difficulty, and numbers of questions to train on and held out; as in the Makefile"""


def learn(name: str, options: argparse.Namespace) -> RunFolder:
    """The complete run of a case."""
    data, run = options.folder / "data", RunFolder(options.folder / name)
    for task, (difficulty, train, heldout) in TASKS.items():
        if not (data / task).is_dir():
            sizes = ["--difficulty", difficulty, "--num", str(train), "--heldout", str(heldout)]
            run_tools("prepare", "reasoning-gym", task, str(data), *sizes)
    if not run.export.is_dir():
        settings = [
            f"run.dir={options.folder}", f"run.name={name}", f"model.path={options.model}", f"steps={options.steps}",
            f"trainer.updates_per_rollout={UPDATES}", "eval.every_steps=5", "tracking.wandb=disabled",
        ]  # fmt: skip
        recipe = [str(options.recipe), *settings, *CASES[name].settings, *options.settings]
        run_python("-m", "slimrl.cli", "train", *recipe, "--resume-or-start")
    return run


def curve_of(run: RunFolder) -> list[list[float]]:
    """[step, accuracy over all held-out questions] of each evaluation."""
    whole = sum(heldout for _, _, heldout in TASKS.values())
    return [
        [step["step"], sum(step[f"eval/{task}/reward_mean"] * TASKS[task][2] for task in TASKS) / whole]
        for step in read_metrics(run.metrics)
        if "eval/gcd/reward_mean" in step
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs/bench/algorithms_real"),
        help="data and runs, one for each choice of settings",
    )
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of the model")
    parser.add_argument("--recipe", type=Path, default=RECIPE, help="the recipe, such as that in bfloat16")
    parser.add_argument("--json", type=Path, help="the curves")
    parser.add_argument("--plot", type=Path, help="PNG of the curves")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="further settings of every run")
    options = parser.parse_args()
    results: dict[str, dict[str, Any]] = {name: {"0": {"curve": curve_of(learn(name, options))}} for name in CASES}
    write_figures(options.json, {"steps": options.steps, "results": results})
    print_table(results)
    if options.plot is not None:
        draw(results, options.plot, CASES)


if __name__ == "__main__":
    main()
