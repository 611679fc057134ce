"""Figures of one rollout batch for metrics.jsonl."""

from collections.abc import Sequence

import numpy as np

from slimrl.data.trajectory import Status, Trajectory


def rollout_metrics(trajectories: Sequence[Trajectory], seconds: float) -> dict[str, float]:
    """Metrics of a batch of scored trajectories that took `seconds` to make.

    `rollout/tool_error_fraction` is of tool calls (0 when there was none); the other fractions are of trajectories.
    Failed trajectories have no reward and do not count in `reward/mean`, nor in the mean of a named part.
    """
    scored = [t for t in trajectories if t.status is not Status.failed]
    parts = sorted({name for t in scored for name in t.rewards})
    tokens = sum(t.num_sampled_tokens for t in trajectories)
    calls = sum(t.metadata["num_tool_calls"] for t in trajectories)
    errors = sum(t.metadata["num_tool_errors"] for t in trajectories)
    return {
        "reward/mean": float(np.mean([t.reward for t in scored])) if scored else float("nan"),
        **{f"reward/parts/{name}": float(np.mean([t.rewards.get(name, 0.0) for t in scored])) for name in parts},
        "reward/timeouts": sum(bool(t.metadata.get("reward_timed_out")) for t in trajectories),
        "rollout/trajectories": len(trajectories),
        "rollout/tokens": tokens,
        "rollout/tokens_per_s": tokens / seconds,
        "rollout/turns_mean": float(np.mean([t.metadata["num_turns"] for t in trajectories])),
        "rollout/truncated_fraction": _fraction(trajectories, Status.truncated),
        "rollout/aborted_fraction": _fraction(trajectories, Status.aborted),
        "rollout/failed_fraction": _fraction(trajectories, Status.failed),
        "rollout/tool_error_fraction": errors / calls if calls else 0.0,
        "rollout/retries": sum(t.metadata["num_retries"] for t in trajectories),
    }


def _fraction(trajectories: Sequence[Trajectory], status: Status) -> float:
    return sum(t.status is status for t in trajectories) / len(trajectories)
