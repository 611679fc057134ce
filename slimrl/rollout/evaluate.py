"""Accuracy on an evaluation set: one trajectory per prompt under the evaluation sampling settings."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slimrl.data.trajectory import Status, Trajectory


@dataclass(frozen=True, kw_only=True)
class EvalResult:
    """Figures of one evaluation set."""

    name: str
    accuracy: float
    """Mean reward; a trajectory that failed counts as 0."""
    num_prompts: int
    turns_mean: float
    tool_calls_mean: float
    truncated_fraction: float
    failed_fraction: float


def evaluate(name: str, trajectories: Sequence[Trajectory]) -> EvalResult:
    """Sums up scored trajectories of the set `name`."""
    return EvalResult(
        name=name,
        accuracy=float(np.mean([0.0 if t.status is Status.failed else t.reward for t in trajectories])),
        num_prompts=len(trajectories),
        turns_mean=float(np.mean([t.metadata["num_turns"] for t in trajectories])),
        tool_calls_mean=float(np.mean([t.metadata["num_tool_calls"] for t in trajectories])),
        truncated_fraction=float(np.mean([t.status is Status.truncated for t in trajectories])),
        failed_fraction=float(np.mean([t.status is Status.failed for t in trajectories])),
    )
