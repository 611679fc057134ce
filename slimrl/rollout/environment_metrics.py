"""Metrics of the environments of a rollout's trajectories."""

from collections.abc import Sequence

import numpy as np

from slimrl.data.trajectory import Trajectory
from slimrl.rollout.gateway_metrics import gateway_metrics


def environment_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Mean seconds of a trajectory's environment, starts that were tried again, and the environments' own metrics.

    `env/<metric>` is the mean over the trajectories that have it. Trajectories of a file may have no report; without
    any there are no metrics.
    """
    reports = [t.metadata["environment"] for t in trajectories if "environment" in t.metadata]
    if not reports:
        return {}
    own = sorted({name for report in reports for name in report.get("metrics", {})})
    return {
        "time/env_start_s": _mean([t.times.get("start_s", 0.0) for t in trajectories]),
        "time/env_step_s": _mean([t.times.get("step_s", 0.0) for t in trajectories]),
        "time/env_close_s": _mean([t.times.get("close_s", 0.0) for t in trajectories]),
        "rollout/env_start_retries": sum(report.get("start_retries", 0) for report in reports),
        **gateway_metrics(trajectories),
        **{f"env/{name}": _mean([r["metrics"][name] for r in reports if name in r.get("metrics", {})]) for name in own},
    }


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))
