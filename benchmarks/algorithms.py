"""Algorithms compared on the calculator task made harder: learning curves of a toy from the same cold start.

1. A toy is trained by imitation for fewer updates than the quickstart's, so that it solves about a quarter of the
   problems. So is a smaller one, the student of the distillation.
2. Each case is one run of `slimrl train` from there: 40 steps of 4 optimizer updates, the accuracy on held-out problems
   every 5 steps. Cases differ in the settings of CASES alone. The learning rates are the best of the sweep's by the
   area under the curve, one for ratios of sequences and one for ratios of tokens.
3. The table has each case's final accuracy and the area under its curve; `--plot` draws the curves.

A run has one trainer rank and one engine; `--parallel 2` keeps two cores busy with two runs at a time.

It takes hours, so it continues: results in the file of `--json` are not measured again, and a run that was ended goes
on from its checkpoint.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from figures import make_table, write_figures
from rich.console import Console

from slimrl.observability.metrics import read_metrics

RECIPES = Path(__file__).parents[1] / "recipes" / "tiny_moe"
HELDOUT = "eval/heldout/reward_mean"
SEQUENCE_LR, TOKEN_LR, CRITIC_LR = 1e-4, 1e-4, 1e-3
"""For ratios of sequences, for ratios of tokens, and of the critic; the cases of SWEEP try others."""
SWEEP = (5e-5, 1e-4, 2e-4, 4e-4)
RUN_TIMEOUT_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Case:
    settings: tuple[str, ...]
    seeds: int = 1
    model: str = "start"
    """Folder of the initial weights"""
    teacher: str = ""
    """Case whose trained model of seed 0 is the teacher"""
    recipe: str = "gspo_calculator.yaml"
    panel: str = "algorithms, one seed"
    """Name of the plot's panel; empty to leave the case out of the plot"""


def algorithm(name: str, *more: str, lr: float = TOKEN_LR, **options: Any) -> Case:
    return Case(settings=(f"algorithm.name={name}", f"trainer.optimizer.lr={lr}", *more), **options)


def gspo(*more: str, panel: str, **options: Any) -> Case:
    return algorithm("gspo", *more, lr=SEQUENCE_LR, panel=panel, **options)


SEEDS: dict[str, Any] = {"seeds": 3, "panel": "algorithms, three seeds"}
NOISY = ("trainer.megatron={moe_input_jitter_eps: 0.03}", "algorithm.max_logprob_mismatch=1.0")
"""The trainer's routers see their inputs times a random number near 1, the engines' do not."""
NOISY_SLIMRL = Path(__file__).parent / "noisy_slimrl.py"
"""The command that accepts them."""
R3 = ("rollout.routed_experts=true", "algorithm.routing_replay=rollout", "algorithm.replay_gap_every_steps=0")
FP8 = ("algorithm.max_logprob_mismatch=1.0",)
CORRECTED = ("algorithm.correction.level=token", "algorithm.correction.high=2")
CASES = {
    **{
        f"sweep: {name}, {lr:g}": algorithm(name, lr=lr, panel="")
        for name, own in (("gspo", SEQUENCE_LR), ("grpo", TOKEN_LR))
        for lr in SWEEP if lr != own
    },
    "gspo": algorithm("gspo", lr=SEQUENCE_LR, **SEEDS),
    "grpo": algorithm("grpo", **SEEDS),
    "ppo": algorithm("ppo", f"critic.trainer.optimizer.lr={CRITIC_LR}", recipe="ppo_calculator.yaml", **SEEDS),
    "cispo": algorithm("cispo", **SEEDS),
    "gspo_token": algorithm("gspo_token", lr=SEQUENCE_LR),
    "dr_grpo": algorithm("dr_grpo"),
    "dapo": algorithm("dapo"),
    "rloo": algorithm("rloo"),
    "reinforce_pp": algorithm("reinforce_pp"),
    "reinforce_pp_baseline": algorithm("reinforce_pp_baseline"),
    "opo": algorithm("opo"),
    "gpg": algorithm("gpg"),
    "sapo": algorithm("sapo"),
    "gmpo": algorithm("gmpo", lr=SEQUENCE_LR),
    "vspo": algorithm("vspo"),
    "rejection_sampling": algorithm("rejection_sampling"),
    "gspo, noisy router": gspo(*NOISY, panel="a noisy router"),
    "gspo, noisy router, R3": gspo(*NOISY, *R3, panel="a noisy router"),
    "gspo, FP32 rollout": gspo(model="start_tiles", panel="engines in FP8"),
    "gspo, FP8 rollout": gspo(*FP8, model="start_fp8", panel="engines in FP8"),
    "gspo, FP8 rollout, corrected": gspo(*FP8, *CORRECTED, model="start_fp8", panel="engines in FP8"),
    "gspo, smaller model": gspo(model="start_small", panel="a smaller model"),
    "distillation, smaller model": algorithm(
        "distillation", model="start_small", teacher="gspo", panel="a smaller model"
    ),
}  # fmt: skip


class Bench:
    """The folder of the models and runs, and the results so far."""

    def __init__(
        self, folder: Path, results: Path | None, steps: int, extra: Sequence[str], cases: Mapping[str, Case]
    ) -> None:
        self.cases = cases
        self.folder, self.file, self.steps, self.extra = folder, results, steps, list(extra)
        self.results: dict[str, dict[str, Any]] = {}
        self.lock = Lock()
        """Held by the run whose results are written"""
        if results is not None and results.is_file():
            self.results = json.loads(results.read_text())["results"]

    def prepare(self, sft_updates: int, problems: int, chosen: Sequence[str]) -> None:
        """Write the data, and the models that the chosen cases start from, unless they are there."""
        teachers = {self.cases[name].teacher for name in chosen} - {""}
        models = {self.cases[name].model for name in teachers.union(chosen)}
        data = self.folder / "data"
        if not data.is_dir():
            counts = ["--num-heldout", str(problems), "--num-conversations", "12000"]
            run_tools("calculator-data", str(data), *counts)
        if "start" in models:
            self._start("start", sft_updates, hidden=128, layers=3)
        if "start_small" in models:
            self._start("start_small", sft_updates, hidden=64, layers=2)
        if models & {"start_tiles", "start_fp8"}:
            # Keys and values of 128 rows, whole tiles of block FP8.
            self._start("start_tiles", sft_updates, hidden=128, layers=3, kv_heads=4)
        if "start_fp8" in models and not (self.folder / "start_fp8").is_dir():
            run_tools("quantize", str(self.folder / "start_tiles"), str(self.folder / "start_fp8"))

    def _start(self, name: str, sft_updates: int, *, hidden: int, layers: int, kv_heads: int = 2) -> None:
        """The initial weights of runs: a random model after the cold start."""
        model, start = self.folder / f"{name}_random", self.folder / name
        if not model.is_dir():
            sizes = ["--hidden", str(hidden), "--moe-intermediate", str(hidden), "--layers", str(layers)]
            run_tools("toy", "qwen3_moe", str(model), *sizes, "--kv-heads", str(kv_heads))
        if not start.is_dir():
            settings = [
                f"steps={sft_updates}", f"model.path={model}", f"data.train={self.folder / 'data' / 'sft.jsonl'}",
                f"run.name={name}", f"run.dir={self.folder / 'runs'}", "tracking.wandb=disabled",
                "checkpoint.every_steps=100",
                f"trainer.optimizer.warmup_updates={min(20, sft_updates - 1)}",
                # Every machine starts from the same weights, which are those of the results.
                "trainer.parallel.expert=2", "deterministic=true",
            ]  # fmt: skip
            run_python("-m", "slimrl.cli", "sft", str(RECIPES / "sft.yaml"), *settings, "--resume-or-start")
            self.export_of(name).rename(start)

    def export_of(self, run: str) -> Path:
        return self.folder / "runs" / run / "export" / "hf"

    def measure(self, name: str, seed: int) -> None:
        """Run one case with one seed, or go on with its run, and keep its curve."""
        if str(seed) in self.results.get(name, {}):
            return
        case, run, data = self.cases[name], _run_name(name, seed), self.folder / "data"
        settings = [
            f"steps={self.steps}", f"seed={seed}", f"run.name={run}", f"run.dir={self.folder / 'runs'}",
            f"model.path={self.folder / case.model}", f"data.train={data / 'train.jsonl'}",
            f"data.eval.heldout={data / 'heldout.jsonl'}", "eval.every_steps=5",
            "rollout.prompts_per_step=16",
            # The accuracy of the policy that is trained, not of its likeliest tokens.
            "rollout.eval_sampling.temperature=1",
            "trainer.num_ranks=1", "trainer.parallel.expert=1", "rollout.num_engines=1",
            "trainer.updates_per_rollout=4", "trainer.optimizer.schedule=constant", "trainer.optimizer.min_lr=0",
            "checkpoint.every_steps=10", "checkpoint.keep=1", "tracking.wandb=disabled",
        ]  # fmt: skip
        if case.teacher:
            settings.append(f"teacher.path={self.export_of(_run_name(case.teacher, 0))}")
        # A run that ended just before its result was kept is complete, and refuses to go on.
        if not self.export_of(run).is_dir():
            arguments = [str(RECIPES / case.recipe), *settings, *case.settings, *self.extra]
            command = [str(NOISY_SLIMRL)] if set(NOISY) <= set(case.settings) else ["-m", "slimrl.cli"]
            run_python(*command, "train", *arguments, "--resume-or-start")
        metrics = read_metrics(self.folder / "runs" / run / "metrics.jsonl")
        curve = [[step["step"], step[HELDOUT]] for step in metrics if HELDOUT in step]
        kept = ("mismatch/logprob_abs_mean", "policy/clip_fraction", "policy/effective_sample_size")
        means = {key: float(np.mean([step[key] for step in metrics if key in step] or [np.nan])) for key in kept}
        seconds = sum(step["time/step_s"] for step in metrics)
        hours = (seconds + sum(step.get("time/eval_s", 0.0) for step in metrics)) / 3600
        with self.lock:
            found = {"curve": curve, "means": means, "hours": hours, "seconds": seconds}
            self.results.setdefault(name, {})[str(seed)] = found
            self.write()

    def measure_all(self, cases: Sequence[str], seeds: int, parallel: int) -> None:
        """Cases and their seeds, `parallel` runs at a time; students after all others, among which is their teacher."""
        jobs = {(seed, name) for name in cases for seed in range(min(self.cases[name].seeds, seeds))}
        jobs |= {(0, self.cases[name].teacher) for name in cases if self.cases[name].teacher}
        # All cases with one seed first, so that an early end leaves a whole table.
        in_order = sorted(jobs, key=lambda job: (job[0], list(self.cases).index(job[1])))
        pool = ThreadPoolExecutor(parallel)
        try:
            for students in (False, True):
                wave = [(name, seed) for seed, name in in_order if bool(self.cases[name].teacher) is students]
                for run in [pool.submit(self.measure, *job) for job in wave]:
                    run.result()
        finally:
            # After Ctrl-C or a run that failed no other begins.
            pool.shutdown(cancel_futures=True)

    def write(self) -> None:
        write_figures(self.file, {"steps": self.steps, "results": self.results, "table": table_of(self.results)})


def _run_name(case: str, seed: int) -> str:
    return f"{case}-{seed}".replace(" ", "_").replace(",", "").replace(":", "")


def table_of(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Each case's mean and spread of the area under the curve (mean accuracy over the steps) and the final accuracy."""
    table = {}
    for name, by_seed in results.items():
        curves = [np.array(run["curve"]) for run in by_seed.values()]
        areas = [np.trapezoid(curve[:, 1], curve[:, 0]) / (curve[-1, 0] - curve[0, 0]) for curve in curves]
        finals = [curve[-1, 1] for curve in curves]
        table[name] = {
            "seeds": len(curves),
            "start": float(np.mean([curve[0, 1] for curve in curves])),
            "area": float(np.mean(areas)),
            "area_spread": float(np.ptp(areas)),
            "final": float(np.mean(finals)),
            "final_spread": float(np.ptp(finals)),
        }
    return table


def print_table(results: dict[str, dict[str, Any]]) -> None:
    title = "accuracy on held-out problems: mean over the seeds, in brackets largest - smallest"
    table = make_table(title, ("case", "seeds", "start", "area under the curve", "final"))
    for name, row in sorted(table_of(results).items(), key=lambda item: -item[1]["area"]):
        several = row["seeds"] > 1
        figures = [
            f"{row[key]:.3f}" + (f" ({row[f'{key}_spread']:.3f})" if several else "") for key in ("area", "final")
        ]
        table.add_row(name, str(row["seeds"]), f"{row['start']:.3f}", *figures)
    Console(width=120).print(table)


def draw(results: dict[str, dict[str, Any]], out: Path, cases: Mapping[str, Case]) -> None:
    """The curves of the cases, a panel for each of their kinds; of several seeds the mean and the range."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    panels: dict[str, list[str]] = {}
    for name, case in cases.items():
        if name in results and case.panel:
            panels.setdefault(case.panel, []).append(name)
    figure, axes = plt.subplots(
        1, len(panels), figsize=(5 * len(panels), 4.6), sharey=True, layout="constrained", squeeze=False
    )
    for axis, (title, names) in zip(axes[0], panels.items(), strict=True):
        for name in names:
            runs = [np.array(run["curve"]) for run in results[name].values()]
            values = np.stack([run[:, 1] for run in runs])
            (line,) = axis.plot(runs[0][:, 0], values.mean(0), label=name)
            if len(runs) > 1:
                axis.fill_between(runs[0][:, 0], values.min(0), values.max(0), color=line.get_color(), alpha=0.15)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step")
        axis.grid(color="#e5e7eb", linewidth=0.6)
        axis.legend(fontsize=7)
    axes[0, 0].set_ylabel("accuracy on held-out problems")
    figure.savefig(out, dpi=110, facecolor="white")
    plt.close(figure)


def run_tools(*arguments: str) -> None:
    run_python("-m", "slimrl_tools.cli", *arguments)


def run_python(*arguments: str) -> None:
    """Python with these arguments. Raises CalledProcessError or TimeoutExpired."""
    subprocess.run([sys.executable, *arguments], check=True, timeout=RUN_TIMEOUT_S)


def parser_of(doc: str, cases: Mapping[str, Case], *, seeds: int, steps: int) -> argparse.ArgumentParser:
    """Options of a comparison of cases, with the defaults of these two."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/bench/algorithms"), help="models and runs")
    parser.add_argument("--json", type=Path, help="results, from which a later start continues")
    parser.add_argument("--plot", type=Path, help="PNG of the curves")
    parser.add_argument("--case", action="append", choices=cases, help="only this one; may be repeated")
    parser.add_argument("--seeds", type=int, default=seeds, help="at most so many of each case")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--sft-updates", type=int, default=560)
    parser.add_argument("--problems", type=int, default=256, help="held-out problems")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="further settings of every run")
    return parser


def main() -> None:
    parser = parser_of(__doc__, CASES, seeds=3, steps=40)
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time")
    options = parser.parse_args()
    bench = Bench(options.folder, options.json, options.steps, options.settings, CASES)
    chosen = options.case or list(CASES)
    bench.prepare(options.sft_updates, options.problems, chosen)
    bench.measure_all(chosen, options.seeds, options.parallel)
    print_table(bench.results)
    if options.plot is not None:
        draw(bench.results, options.plot, CASES)


if __name__ == "__main__":
    main()
