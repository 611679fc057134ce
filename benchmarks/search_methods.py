"""What searching an episode's steps earns for its tokens, and what is learned from its paths.

`python benchmarks/search_methods.py textworld --folder FOLDER`, with the folder of `agent_tasks.py textworld`.

1. The policy of the cold start is evaluated on the held-out questions: greedy, by one sample, and by each search.
2. For as many training questions, paths of a search and samples of about as many tokens are kept if they have the full
   reward, each becomes a model by supervised training, and both models are evaluated by one sample.

Where the reward knows the label, the accuracies of searches are upper bounds: an agent could not choose so.
"""

import argparse
import json
from pathlib import Path

from agent_tasks import RECIPES, SFT, TASKS, run_module
from figures import make_table, write_figures
from rich.console import Console

from slimrl.evaluation.folder import EvalFolder
from slimrl.evaluation.plot import write_plot

SEARCHES = {
    "best_of_2": ("best_of_n", "width=2"),
    "best_of_4": ("best_of_n", "width=4"),
    "beam_2": ("beam", "width=4", "beam=2"),
    "mcts_4": ("mcts", "width=3", "expansions=4"),
    "mcts_12": ("mcts", "width=3", "expansions=12"),
}
METHODS = {
    "greedy": ["rollout.eval_sampling.temperature=0"],
    "sample": [],
    **{
        name: [f"agent.search.method={method}", *(f"agent.search.{setting}" for setting in settings)]
        for name, (method, *settings) in SEARCHES.items()
    },
}
PATHS = "best_of_4"
"""The search whose paths are learned from"""


class Bench:
    """
    Args:
        folder: of agent_tasks; the results go to its folder `search`.
        problems: held-out questions.
        settings: further ones of the recipe.
    """

    def __init__(self, task: str, folder: Path, problems: int, settings: list[str]) -> None:
        self._recipe, self._folder, self.out = str(RECIPES / TASKS[task].recipe), folder, folder / "search"
        self.out.mkdir(exist_ok=True)
        self.cold_start = folder / "sft" / "export" / "hf"
        lines = (folder / "data" / "heldout.jsonl").read_text().splitlines(keepends=True)[:problems]
        (self.out / "heldout.jsonl").write_text("".join(lines))
        self._settings = [
            f"run.dir={self.out}", "tracking.wandb=disabled", f"data.train={folder / 'data' / 'train.jsonl'}",
            f"data.eval.heldout={self.out / 'heldout.jsonl'}", *settings,
        ]  # fmt: skip

    def evaluated(self, name: str, checkpoint: Path, settings: list[str]) -> EvalFolder:
        found = EvalFolder(self.out / name)
        if not found.summary.is_file():
            options = ["--checkpoint", str(checkpoint), "--out", str(found.path)]
            run_module("slimrl.cli", "eval", self._recipe, *options, *self._of(checkpoint), *settings)
        return found

    def kept(self, name: str, settings: list[str], questions: int) -> tuple[Path, int]:
        """Conversations of full reward, and how many tokens were sampled for them."""
        out, told = self.out / f"{name}.jsonl", self.out / f"{name}_sft.jsonl"
        if not told.is_file():
            files = ["--out", str(out), "--conversations", str(told)]
            sampled = [f"rollout.prompts_per_step={questions}", *self._of(self.cold_start), *settings]
            run_module("slimrl.cli", "rollout", self._recipe, *files, *sampled)
        tokens = 0
        for line in map(json.loads, out.open()):
            own = sum(sum(segment["loss_mask"]) for segment in line["segments"])
            tokens += line["metadata"].get("search", {}).get("num_tokens", own)
        return told, tokens

    def learned(self, name: str, told: Path, updates: int) -> Path:
        export = self.out / "runs" / name / "export" / "hf"
        if not export.is_dir():
            given = [
                f"run.dir={self.out / 'runs'}", f"run.name={name}", "tracking.wandb=disabled", f"steps={updates}",
                "sft.max_tokens=512", "trainer.num_ranks=1", "trainer.parallel.expert=1", "trainer.optimizer.lr=5e-4",
                "trainer.max_tokens_per_rank=4096", f"model.path={self.cold_start}", f"data.train={told}",
            ]  # fmt: skip
            run_module("slimrl.cli", "sft", str(SFT), *given, "--resume-or-start")
        return export

    def _of(self, checkpoint: Path) -> list[str]:
        return [f"model.path={checkpoint}", *self._settings]


def figures_of(found: EvalFolder) -> dict[str, float]:
    one = json.loads(found.summary.read_text())["sets"]["heldout"]
    measure, (low, high) = next(iter(one["intervals"].items()))
    return {"accuracy": one[measure], "low": low, "high": high, "tokens": one["tokens_mean"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--folder", type=Path, required=True, help="of agent_tasks.py")
    parser.add_argument("--problems", type=int, default=64, help="held-out questions")
    parser.add_argument("--questions", type=int, default=128, help="training questions of the second part; 0 for none")
    parser.add_argument("--updates", type=int, default=40, help="of the supervised training")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--json", type=Path, help="the figures")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="further settings of the recipe")
    options = parser.parse_intermixed_args()
    bench = Bench(options.task, options.folder, options.problems, options.settings)
    found = {name: bench.evaluated(name, bench.cold_start, METHODS[name]) for name in options.methods}
    write_plot(list(found.values()), bench.out / "search.png", f"{options.task}: accuracy over sampled tokens")
    figures = {name: figures_of(one) for name, one in found.items()}
    if options.questions:
        paths, spent = bench.kept("paths", [*METHODS[PATHS], "rollout.samples_per_prompt=1"], options.questions)
        per_sample = figures["sample"]["tokens"] * options.questions
        samples_per_prompt = max(2, round(spent / per_sample))
        samples, spent_too = bench.kept(
            "samples", [f"rollout.samples_per_prompt={samples_per_prompt}"], options.questions
        )
        for name, told, tokens in (("paths", paths, spent), ("samples", samples, spent_too)):
            model = bench.learned(f"sft_{name}", told, options.updates)
            one = figures_of(bench.evaluated(f"after_{name}", model, METHODS["sample"]))
            figures[f"after {name}"] = one | {"sampled": tokens, "conversations": len(told.read_text().splitlines())}
    write_figures(options.json, {"task": options.task, **figures})
    table = make_table(
        f"{options.task}: a search on held-out questions", ("method", "accuracy", "95% interval", "tokens")
    )
    for name, one in figures.items():
        table.add_row(name, f"{one['accuracy']:.3f}", f"{one['low']:.3f} to {one['high']:.3f}", f"{one['tokens']:.1f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
