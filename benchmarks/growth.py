"""The driver's own time for a step, with more and more trajectories and trainer ranks.

`train` of slimrl/runtime/loop.py runs its steps as in a run: rollout stage, rewards, selection, packing, the trainer's
ranks, metrics, samples and the resync are the real ones, and so is Ray. What the driver talks to is made up:

- an episode is a trajectory that was drawn before and that is unpickled as one of an episode worker is;
- a few actors stand for all ranks. They hold their batches and report on them as a rank does, without a model;
- an engine exists by name alone.

Time is the CPU time of all threads of the driver, by part: a part's own calls of another part are that part's. Bytes
are those that Ray serializes in the driver, and that it reads there.
"""

import argparse
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from figures import make_table, write_figures
from made_up_engine import LABEL, QUESTION, MadeUpEngine
from made_up_episodes import SAMPLES, MadeUpEpisodes
from made_up_ranks import NUM_ACTORS, TENSOR, RankActors, layout_of
from ray._private.serialization import SerializationContext
from rich.console import Console

from slimrl.config.schema.algorithm import AdvantageName
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.reward import RewardConfig
from slimrl.config.schema.run import WandbMode
from slimrl.data.prompt import Prompt
from slimrl.data.prompts import Sampler
from slimrl.observability.progress import Progress
from slimrl.observability.run_folder import open_run_folder
from slimrl.observability.trackers import Trackers
from slimrl.rewards.loading import load_rewards
from slimrl.rollout.service import RolloutService
from slimrl.rollout.stage import RolloutStage
from slimrl.runtime import learner, train_run
from slimrl.runtime.cluster import trainer_group
from slimrl.runtime.cluster.ray_cluster import ray_cluster
from slimrl.runtime.cluster.trainer_group import TrainerGroup
from slimrl.runtime.loop import train
from slimrl.runtime.state import RunState
from slimrl.runtime.step_metrics import Step
from slimrl.runtime.train_run import TrainRun

SLOTS = 4
"""Trajectories for each slot of the rollout"""

PARTS: dict[str, tuple[tuple[Any, str], ...]] = {
    "rollout": ((RolloutService, "take"),),
    "packing": ((learner, "make_updates"),),
    "batches to ranks": ((TrainerGroup, "put_batches"),),
    "calls of ranks": ((TrainerGroup, "call"), (TrainerGroup, "gather")),
    "metrics": tuple(
        (module, name)
        for module, names in (
            (train_run, ("rollout_metrics", "environment_metrics", "loop_lag_metrics", "teacher_metrics")),
            (learner, ("mismatch_metrics", "entropy_mean", "denominator", "update_metrics", "policy_metrics")),
            (learner, ("is_split",)),
        )
        for name in names
    ),
    "samples": ((train_run, "write_samples"),),
    "resync": ((TrainRun, "resync"),),
}
"""What each part calls; the rollout selects too, and `other` is the rest of a step"""
OTHER = "other"


class Meter:
    """Seconds by part of a step, and the bytes that pass through the driver's Ray."""

    def __init__(self) -> None:
        self.steps: list[dict[str, dict[str, float]]] = []
        self._cpu_s: dict[str, float] = {}
        self._running: list[str] = []
        self._since = 0.0
        self._bytes: dict[str, int] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """The block is this part's, but for the parts inside it."""
        self._add_up()
        self._running.append(name)
        yield
        self._add_up()
        self._running.pop()

    @contextmanager
    def step(self) -> Iterator[None]:
        self._cpu_s, self._bytes = defaultdict(float), {"sent": 0, "received": 0}
        start, self._since = time.perf_counter(), time.process_time()
        with self.part(OTHER):
            yield
        self.steps.append(
            {"cpu_s": dict(self._cpu_s), "wall_s": {"step": time.perf_counter() - start}, "bytes": dict(self._bytes)}
        )

    def count(self, way: str, num_bytes: int) -> None:
        if self._running:
            self._bytes[way] += num_bytes

    def _add_up(self) -> None:
        now = time.process_time()
        if self._running:
            self._cpu_s[self._running[-1]] += now - self._since
        self._since = now


def attach(meter: Meter) -> None:
    """Have the meter see the parts, and what Ray serializes and reads, from now on."""

    def timed(function: Callable[..., Any], part: str) -> Callable[..., Any]:
        @wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            with meter.part(part):
                return function(*arguments, **options)

        return call

    for part, functions in PARTS.items():
        for owner, name in functions:
            setattr(owner, name, timed(getattr(owner, name), part))
    serialize, deserialize = SerializationContext.serialize, SerializationContext.deserialize_objects

    def counted(self: SerializationContext, value: Any) -> Any:
        found = serialize(self, value)
        meter.count("sent", found.total_bytes)
        return found

    def read(self: SerializationContext, objects: Any, *rest: Any) -> Any:
        meter.count("received", sum(len(data) for data, *_ in objects if data is not None))
        return deserialize(self, objects, *rest)

    SerializationContext.serialize = counted  # type: ignore[method-assign]
    SerializationContext.deserialize_objects = read  # type: ignore[method-assign, assignment]


class NamedEngine:
    """In place of EngineGroup: one engine, which serves."""

    receivers = (SimpleNamespace(name="engine 0"),)
    num_replaced, need_weights = 0, False

    def have_weights(self, names: set[str]) -> None:
        return


class MeteredRun(TrainRun):
    """A run whose steps have a meter."""

    meter: Meter

    @contextmanager
    def next_step(self) -> Iterator[Step]:
        with self.meter.step(), super().next_step() as step:
            yield step


def recipe_of(trajectories: int, ranks: int, steps: int) -> Recipe:
    """Two updates of a rollout, the second of which needs a pass for old log-probs, and a reference with one more."""
    recipe = Recipe(steps=steps)
    recipe.run.name = "growth"
    recipe.reward.function = "slimrl.rewards.math:boxed_exact"
    recipe.rollout.prompts_per_step, recipe.rollout.samples_per_prompt = trajectories // SAMPLES, SAMPLES
    recipe.rollout.num_engines = 1
    recipe.rollout.max_concurrency_per_engine = max(1, trajectories // SLOTS)
    recipe.rollout.adaptive_concurrency = False
    recipe.rollout.max_trajectory_tokens = recipe.trainer.max_tokens_per_rank = 4096
    recipe.trainer.num_ranks, recipe.trainer.updates_per_rollout = ranks, 2
    recipe.trainer.parallel.tensor = layout_of(0, ranks).tensor
    recipe.algorithm.advantage = AdvantageName.grpo
    recipe.algorithm.kl_coef, recipe.algorithm.max_logprob_mismatch = 1e-3, 1.0
    recipe.checkpoint.every_steps = recipe.eval.every_steps = 0
    recipe.eval.at_start = recipe.eval.at_end = False
    recipe.tracking.wandb = WandbMode.disabled
    return recipe


def run_steps(trajectories: int, ranks: int, steps: int, meter: Meter, where: Path) -> dict[str, int]:
    """Run so many steps under a meter; returns the totals of a step's trajectories."""
    recipe = recipe_of(trajectories, ranks, steps)
    recipe.run.dir = str(where)
    prompts = [
        Prompt(prompt_id=str(number), messages=[{"role": "user", "content": QUESTION}], label=LABEL)
        for number in range(trajectories // SAMPLES)
    ]
    episodes = MadeUpEpisodes(trajectories)
    rewards = load_rewards(RewardConfig(function=recipe.reward.function), lambda key, load: load())
    task: Any = SimpleNamespace(
        rewards=rewards, group_filters=[], train={"train": prompts}, eval_sets={},
        sandbox=SimpleNamespace(close=episodes.stop),
        roles=(),
    )  # fmt: skip
    engines, workers, preemption = NamedEngine(), episodes, SimpleNamespace(asked=False, check=lambda: None)
    progress, folder = Progress(steps, Console(quiet=True)), open_run_folder(where, recipe.run.name, "", resume=False)
    actors = RankActors(ranks)
    slots = [SimpleNamespace(node=SimpleNamespace(name="node 0")) for _ in range(ranks)]
    places: Any = SimpleNamespace(
        placement=SimpleNamespace(ranks=slots, critics=()), options=lambda slot, variables: {}
    )
    trainer_group.RemoteTrainer = actors  # type: ignore[assignment, misc]
    trainers = TrainerGroup(recipe, folder, progress, places, total_updates=2 * steps)
    trainers.start()
    with (
        Trackers(folder, recipe.tracking, {}, keep_through_step=-1) as trackers,
        RolloutStage(
            recipe, task, MadeUpEngine([]), progress,
            watch=lambda: None, flush_caches=lambda: None, workers=workers,  # type: ignore[arg-type]
        ) as stage,
    ):  # fmt: skip
        run = MeteredRun(
            recipe=recipe, folder=folder, task=task, trainers=trainers, engines=engines, stage=stage,  # type: ignore[arg-type]
            trackers=trackers, progress=progress, state=RunState(), data=Sampler(prompts, seed=0, shuffle=False),
            preemption=preemption,  # type: ignore[arg-type]
        )  # fmt: skip
        run.meter = meter
        train(run)
    actors.kill()
    return episodes.totals


def measure(trajectories: int, ranks: int, repeats: int, meter: Meter) -> dict[str, Any]:
    """The figures of a size, medians over the steps after the first."""
    meter.steps = []
    with tempfile.TemporaryDirectory() as where:
        totals = run_steps(trajectories, ranks, repeats + 1, meter, Path(where))
    figures: dict[str, Any] = {
        kind: {name: float(np.median([step[kind].get(name, 0.0) for step in meter.steps[1:]])) for name in names}
        for kind, names in (("cpu_s", (*PARTS, OTHER)), ("wall_s", ("step",)), ("bytes", ("sent", "received")))
    }
    figures["cpu_s"]["step"] = sum(figures["cpu_s"].values())
    return figures | totals


def print_table(rows: dict[str, dict[str, Any]]) -> None:
    table = make_table("driver, a step", ("figure", *rows))
    for name in (*PARTS, OTHER, "step"):
        table.add_row(f"{name}, CPU s", *(f"{row['cpu_s'][name]:.3f}" for row in rows.values()))
    table.add_row("step, wall s", *(f"{row['wall_s']['step']:.3f}" for row in rows.values()))
    table.add_row("trajectories, MB", *(f"{row['trajectory_bytes'] / 1e6:.2f}" for row in rows.values()))
    for name in ("sent", "received"):
        table.add_row(f"{name}, MB", *(f"{row['bytes'][name] / 1e6:.2f}" for row in rows.values()))
    Console(width=40 + 16 * len(rows)).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trajectories", type=int, nargs="+", default=[128, 1024, 8192], help="of a step")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 64, 512], help="of the trainer")
    parser.add_argument("--repeats", type=int, default=3, help="counted steps of each size")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    if any(n < 2 * SAMPLES or n % SAMPLES for n in options.trajectories) or options.repeats < 1:
        print(f"--trajectories: multiples of {SAMPLES} from {2 * SAMPLES} on; --repeats: at least 1.", file=sys.stderr)
        return 2
    if any(n < 1 or n % min(TENSOR, n) for n in options.ranks):
        print(f"--ranks: multiples of {TENSOR}, or fewer.", file=sys.stderr)
        return 2
    load, rows, meter = os.getloadavg()[0], {}, Meter()
    attach(meter)
    with ray_cluster(None, num_slots=NUM_ACTORS):
        for trajectories in options.trajectories:
            for ranks in options.ranks:
                rows[f"{trajectories} x {ranks}"] = measure(trajectories, ranks, options.repeats, meter)
    print_table(rows)
    write_figures(options.json, {"sizes": rows, "repeats": options.repeats, "load_before": load})
    return 0


if __name__ == "__main__":
    sys.exit(main())
