"""The runs to which faults happen: two of each synchronous mode, one of these deterministic, and one asynchronous."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

RECIPES = Path(__file__).parents[1] / "recipes" / "tiny_moe"
BATCH, MAX_STALENESS = 8, 2
"""Groups of a step, and the oldest that the asynchronous run trains on."""
SAVED_STEPS = 2
"""Steps from one checkpoint to the next"""

COMMON = (
    "eval.every_steps=0", "eval.at_start=false", "eval.at_end=false", "tracking.wandb=disabled",
    f"rollout.prompts_per_step={BATCH}", "rollout.samples_per_prompt=4", "rollout.sampling.max_new_tokens=32",
    "rollout.tool_timeout_s=3", "rollout.request_timeout_s=120", "rollout.trajectory_timeout_s=240",
    "rollout.health_timeout_s=15", "rollout.max_replacements=1000", "rollout.max_concurrency_per_engine=16",
    "rollout.num_engines=2", "resync.timeout_s=40", "resync.verify=full",
    # A rank that hangs in a checkpoint is known after trainer.timeout_s.
    "run.max_restarts=1000", "trainer.hang_timeout_s=30", "trainer.timeout_s=120", "trainer.startup_timeout_s=300",
    "trainer.optimizer.schedule=constant", f"checkpoint.every_steps={SAVED_STEPS}", "checkpoint.keep=2",
)  # fmt: skip
ONE_RANK = ("trainer.num_ranks=1", "trainer.parallel.expert=1")
TWO_RANKS = ("trainer.num_ranks=2", "trainer.parallel.expert=2")
COLOCATED = ("rollout.colocated=true", "resync.transport=ipc")
ASYNC = (
    "rollout.mode=async", f"rollout.max_staleness={MAX_STALENESS}", "rollout.chunk_tokens=16",
    "algorithm.correction.level=token", "agent.tools=[chaos_calculator:calculator]", "agent.workers=2",
    "agent.sandbox.packages=[]", "rollout.max_failed_fraction=1",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Leg:
    """A run of one mode."""

    mode: str
    name: str
    settings: tuple[str, ...]
    slots: tuple[int, ...]
    """Slots of each Ray node beside the head, which has none"""
    exact: bool = False
    """Whether it is deterministic"""

    @property
    def trainer_slots(self) -> int:
        """Slots of a node that takes the place of one with trainers."""
        return max(self.slots)


EXACT = ("deterministic=true", *TWO_RANKS)
LEGS = (
    Leg(mode="colocated", name="colocated_exact", settings=(*EXACT, *COLOCATED), slots=(1, 1), exact=True),
    Leg(mode="colocated", name="colocated", settings=(*TWO_RANKS, *COLOCATED), slots=(1, 1)),
    Leg(
        mode="disaggregated", name="disaggregated_exact", settings=(*EXACT, "resync.transport=p2p"), slots=(2, 2),
        exact=True,
    ),
    Leg(mode="disaggregated", name="disaggregated", settings=(*ONE_RANK, "resync.transport=p2p"), slots=(1, 1, 1)),
    Leg(mode="async", name="async", settings=(*ONE_RANK, *ASYNC, "resync.transport=p2p"), slots=(1, 1, 1)),
)  # fmt: skip
MODES = tuple(dict.fromkeys(leg.mode for leg in LEGS))


def prepare(folder: Path, updates: int) -> Path:
    """The model that calls the tool, and the data, unless they are there."""
    start, data, model = folder / "start", folder / "data", folder / "random"
    if start.is_dir():
        return start
    if not data.is_dir():
        _run("slimrl_tools.cli", "calculator-data", str(data), "--num-heldout", "8")
    if not model.is_dir():
        sizes = ["--hidden", "64", "--moe-intermediate", "64", "--layers", "2"]
        _run("slimrl_tools.cli", "toy", "qwen3_moe", str(model), *sizes)
    settings = [
        f"steps={updates}", f"model.path={model}", f"data.train={data / 'sft.jsonl'}", "run.name=sft",
        f"run.dir={folder / 'runs'}", "tracking.wandb=disabled", "trainer.num_ranks=1", "trainer.parallel.expert=1",
        f"trainer.optimizer.warmup_updates={min(20, updates - 1)}",
    ]  # fmt: skip
    _run("slimrl.cli", "sft", str(RECIPES / "sft.yaml"), *settings, "--overwrite")
    (folder / "runs" / "sft" / "export" / "hf").rename(start)
    return start


def _run(module: str, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", module, *arguments], check=True)
