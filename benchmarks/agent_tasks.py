"""A tiny model learns to use a tool, from random weights to the curve: `python benchmarks/agent_tasks.py TASK`.

1. Data: questions to train on, held-out questions, and demonstrations of mixed quality.
2. A toy with random weights, whose tokenizer knows the words of the task.
3. The cold start: supervised training on the demonstrations.
4. GSPO on the questions, and every few steps the accuracy on the held-out ones.
5. The table has the first and the last accuracy; `--plot` draws the curve.

What is there already is not made again, and a run that was ended goes on from its checkpoint.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from figures import make_table, write_figures
from rich.console import Console

from slimrl.observability.metrics import read_metrics
from slimrl.observability.report import write_curve
from slimrl.observability.run_folder import RunFolder

BENCHMARKS = Path(__file__).parent
RECIPES = BENCHMARKS.parent / "recipes"
SFT = RECIPES / "tiny_moe" / "sft.yaml"


@dataclass(frozen=True, kw_only=True)
class Task:
    recipe: str
    """File of GSPO's recipe, in recipes/"""
    program: tuple[str, ...] = ("-m", "slimrl_tools.cli")
    """What Python runs to write the data"""
    data: tuple[str, ...] = ()
    """Its words, without the folder"""
    heldout: int = 256
    heldout_option: str = "--heldout"
    conversations_option: str = ""
    """Empty where the words above say how many demonstrations there are"""
    words: str = "sft.jsonl"
    """File of the data whose words become tokens"""
    sft_updates: int
    """Updates of the cold start"""
    max_position: int = 1024
    """Positions of the toy, at least `rollout.max_trajectory_tokens` of the recipe"""


TASKS = {
    "python": Task(
        recipe="tiny_moe/gspo_python.yaml", data=("python-data",), heldout_option="--num-heldout",
        conversations_option="--num-conversations", sft_updates=600,
    ),
    "search": Task(
        recipe="tiny_moe/gspo_search.yaml", data=("search-data",), heldout_option="--num-heldout",
        conversations_option="--num-conversations", sft_updates=1600,
    ),
    "synthesis": Task(
        recipe="tiny_moe/gspo_synthesis.yaml", program=(str(BENCHMARKS / "synthesis_data.py"),), heldout=48,
        conversations_option="--conversations", sft_updates=1600,
    ),
    "proposer": Task(
        recipe="tiny_moe/gspo_proposer.yaml", data=("proposer-data",), heldout=96, heldout_option="--num-heldout",
        conversations_option="--num-conversations", sft_updates=800,
    ),
    "bfcl": Task(
        recipe="tiny_moe/gspo_bfcl.yaml",
        data=(
            "environment", "data", "bfcl", "--num", "600", "--set", "tasks=generated", "--set", "turns=2",
            "--set", "demonstrations=6000",
        ),
        sft_updates=600,
    ),
    "miniwob": Task(
        recipe="tiny_moe/gspo_miniwob.yaml",
        data=(
            "environment", "data", "miniwob", "--num", "2000", "--set", "tasks=click-button,click-test-2",
            "--set", "instructions=Act.", "--set", "demonstrations=8000",
        ),
        sft_updates=400,
    ),
    "kuhn_poker": Task(
        recipe="tiny_moe/gspo_kuhn_poker.yaml",
        data=(
            "environment", "data", "open_spiel", "--num", "600", "--set", "games=kuhn_poker",
            "--set", "heldout_opponents=optimal", "--set", "demonstrations=2000",
        ),
        words="words.txt",
        sft_updates=100,
    ),
    "tic_tac_toe": Task(
        recipe="tiny_moe/gspo_tic_tac_toe.yaml",
        data=(
            "environment", "data", "open_spiel", "--num", "600", "--set", "games=tic_tac_toe",
            "--set", "demonstrations=2000",
        ),
        words="words.txt",
        sft_updates=200,
        max_position=2048,
    ),
    "textarena": Task(
        recipe="tiny_moe/gspo_textarena.yaml",
        data=(
            "environment", "data", "textarena", "--num", "600", "--set", "games=Nim-v0",
            "--set", "demonstrations=2000",
        ),
        words="words.txt",
        sft_updates=300,
        max_position=2048,
    ),
    "textworld": Task(
        recipe="tiny_moe/gspo_textworld.yaml",
        data=(
            "environment", "data", "textworld", "--num", "256", "--set", "theme=basic",
            "--set", "demonstrations=6000", "--set", "processes=2",
        ),
        words="words.txt",
        sft_updates=800,
    ),
    "coin": Task(
        recipe="tiny_moe/gspo_coin.yaml",
        data=(
            "environment", "data", "textworld_express", "--num", "256", "--set", "game=coin",
            "--set", "params=numLocations=6,includeDoors=0,numDistractorItems=0", "--set", "demonstrations=6000",
        ),
        words="words.txt",
        sft_updates=800,
    ),
}  # fmt: skip
"""Task by name; those of environments that others made need `slimrl-tools environment install`"""
HELDOUT = "eval/heldout/reward_mean"
COMMAND_TIMEOUT_S = 7200.0


def prepare(name: str, folder: Path, seed: int, sft_updates: int, counts: Sequence[str]) -> list[str]:
    """Whatever is left of data, model and cold start; settings of GSPO that name them.

    Args:
        counts: options of the command that writes the data.
    """
    task = TASKS[name]
    data, model, sft = folder / "data", folder / "model", RunFolder(folder / "sft")
    if not data.is_dir():
        _run(*task.program, *task.data, str(data), "--seed", str(seed), *counts)
    if not model.is_dir():
        size = ["--max-position", str(task.max_position), "--seed", str(seed)]
        run_module("slimrl_tools.cli", "toy", "qwen3_moe", str(model), "--text", str(data / task.words), *size)
    shared = [f"run.dir={folder}", "tracking.wandb=disabled", f"seed={seed}"]
    if not sft.export.is_dir():
        cold_start = [
            f"steps={sft_updates}", "sft.max_tokens=1024", "checkpoint.every_steps=50", "checkpoint.keep=1",
            "trainer.num_ranks=1", "trainer.parallel.expert=1", "trainer.max_tokens_per_rank=4096",
            f"model.path={model}", f"data.train={data / 'sft.jsonl'}",
        ]  # fmt: skip
        run_module("slimrl.cli", "sft", str(SFT), *shared, *cold_start, "--resume-or-start")
    files = [f"data.train={data / 'train.jsonl'}", f"data.eval.heldout={data / 'heldout.jsonl'}"]
    files += [f"data.more.{file.stem}={file}" for file in sorted(data.glob("level_*.jsonl"))]
    if (data / "corpus.jsonl").is_file():
        files.append(f"agent.tool_args.corpus={data / 'corpus.jsonl'}")
    return [*shared, *files, f"model.path={sft.export}"]


def learn(
    name: str, folder: Path, seed: int, sft_updates: int, counts: Sequence[str], settings: Sequence[str]
) -> RunFolder:
    """Whatever is left of the five parts; returns the folder of GSPO's run."""
    prepared, gspo = prepare(name, folder, seed, sft_updates, counts), RunFolder(folder / "gspo")
    if not gspo.export.is_dir():
        checkpoints = ["checkpoint.every_steps=4", "checkpoint.keep=1"]
        recipe = str(RECIPES / TASKS[name].recipe)
        arguments = [*prepared, "run.name=gspo", *checkpoints, *settings]
        run_module("slimrl.cli", "train", recipe, *arguments, "--resume-or-start")
    return gspo


def run_module(module: str, *arguments: str) -> None:
    """Raises CalledProcessError or TimeoutExpired."""
    _run("-m", module, *arguments)


def _run(*words: str) -> None:
    """Raises CalledProcessError or TimeoutExpired."""
    subprocess.run([sys.executable, *words], check=True, timeout=COMMAND_TIMEOUT_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--seed", type=int, default=0, help="of the data, the model and the run")
    parser.add_argument("--folder", type=Path, help="data, models and runs; runs/agent_tasks/TASK_SEED")
    parser.add_argument("--json", type=Path, help="the curve")
    parser.add_argument("--plot", type=Path, help="PNG of the curve")
    parser.add_argument("--sft-updates", type=int, help="of the cold start")
    parser.add_argument("--problems", type=int, help="held-out questions")
    parser.add_argument("--conversations", type=int, help="demonstrations of python, search, synthesis and proposer")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="further settings of GSPO")
    options = parser.parse_intermixed_args()
    folder = options.folder or Path("runs/agent_tasks") / f"{options.task}_{options.seed}"
    task = TASKS[options.task]
    counts = [task.heldout_option, str(options.problems or task.heldout)]
    if options.conversations is not None and task.conversations_option:
        counts += [task.conversations_option, str(options.conversations)]
    run = learn(options.task, folder, options.seed, options.sft_updates or task.sft_updates, counts, options.settings)
    metrics = read_metrics(run.metrics)
    curve = [(step["step"], step[HELDOUT]) for step in metrics if HELDOUT in step]
    write_figures(options.json, {"task": options.task, "seed": options.seed, "curve": curve})
    table = make_table(f"{options.task}: accuracy on held-out questions", ("step", "accuracy"))
    for step, accuracy in curve:
        table.add_row(str(step), f"{accuracy:.3f}")
    Console(width=120).print(table)
    if options.plot is not None:
        write_curve([run.metrics], options.plot, f"{options.task}: GSPO after the cold start")


if __name__ == "__main__":
    main()
