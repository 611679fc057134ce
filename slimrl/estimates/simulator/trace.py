"""A run's recorded times: groups.jsonl and metrics.jsonl of its folder.

A recorded trajectory takes as long as it took, whatever else runs: in the pool of engines it is a sequence of as many
tokens as it took seconds, at a second for each.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from slimrl.config.schema.recipe import Recipe
from slimrl.estimates.simulator.cluster import Cluster
from slimrl.estimates.simulator.workload import GroupWork, RecordedWorkload, Turn
from slimrl.observability.metrics import read_metrics
from slimrl.observability.run_folder import RunFolder

ENDS = {"taken": "finished", "filtered": "filtered", "failed": "failed"}
"""Way in which a recorded group left -> its end in a simulation. Of a dropped one only the quick trajectories are
known."""

FEW_STEPS = 10
"""Number of recorded steps below which a note says that they are few."""


def read_trace(folder: Path, recipe: Recipe) -> tuple[Cluster, RecordedWorkload, list[str]]:
    """The recorded cluster and work, and notes about them.

    Raises:
        ValueError: the folder lacks one of the files, or they hold no whole step or group.
    """
    run = RunFolder(folder)
    for path in (run.metrics, run.groups):
        if not path.is_file():
            raise ValueError(
                f"--trace {folder}: there is no {path.name}. A run of `slimrl train` with engines writes it."
            )
    lines = _read_groups(run.groups)
    works = [GroupWork(_trajectories(line), ENDS[line["end"]]) for line in lines if line["end"] in ENDS]
    if not any(work.end == "finished" for work in works):
        raise ValueError(f"--trace {folder}: {run.groups.name} holds no group that was trained on.")
    notes = [f"{len(works):,} groups of {folder} are replayed in their order, and again from the first"]
    if dropped := len(lines) - len(works):
        notes.append(
            f"{dropped:,} dropped groups are left out: how long they would have run is not known. A run with "
            "rollout.too_old wait drops none"
        )
    cluster, num_steps = _cluster(run, recipe)
    if num_steps < FEW_STEPS:
        notes.append(f"the times are means of {num_steps} steps, few for a comparison")
    return cluster, RecordedWorkload(works), notes


def _read_groups(path: Path) -> list[dict[str, Any]]:
    """Lines of groups.jsonl, without the broken last line that a killed run may leave."""
    lines = []
    for number, line in enumerate(path.read_text().split("\n")[:-1], 1):
        try:
            value = json.loads(line)
            {"end", "begun", "ended"} <= value.keys() or value["end"]
        except (ValueError, AttributeError, KeyError) as error:
            raise ValueError(f"{path}:{number}: not a group of a run: {error!r}") from error
        lines.append(value)
    return lines


def _trajectories(line: dict[str, Any]) -> list[list[Turn]]:
    """Trajectories of a recorded group, each as one turn from the beginning of its slot on; older runs recorded the
    beginning of the group alone."""
    started = line.get("started") or [line["begun"]] * len(line["ended"])
    return [[Turn(max(0.0, end - start), 0.0)] for start, end in zip(started, line["ended"], strict=True)]


def _cluster(run: RunFolder, recipe: Recipe) -> tuple[Cluster, int]:
    """The cluster with the mean times of the run's steps, and the number of these steps."""
    steps = [line for line in read_metrics(run.metrics) if "time/step_s" in line and "time/rollout_s" in line]
    # The first one warms up.
    steps = steps[1:] or steps
    if not steps:
        raise ValueError(f"{run.metrics}: holds no whole step.")

    def mean(name: str) -> float:
        return float(np.mean([line.get(f"time/{name}_s") or 0.0 for line in steps]))

    rollout = recipe.rollout
    slots = rollout.num_engines * rollout.max_concurrency_per_engine
    cluster = Cluster(
        trainer_ranks=recipe.trainer.num_ranks,
        engine_gpus=0 if recipe.shares_devices else rollout.num_engines * rollout.engine_tp,
        num_engines=rollout.num_engines,
        slots=slots,
        decoding=slots,
        step_s=lambda sequences: 1.0,
        train_s=mean("step") - mean("rollout") - mean("drain") - mean("eval_wait") - mean("resync"),
        resync_s=mean("resync"),
    )
    return cluster, len(steps)
