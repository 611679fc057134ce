"""Metrics of the environments of a rollout's trajectories."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from slimrl.data.trajectory import CACHE_HITS, Trajectory
from slimrl.rollout.gateway_metrics import gateway_metrics


def environment_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Mean seconds of a trajectory's environment, starts that were tried again, and the environments' own metrics.

    `env/<metric>` is the mean over the trajectories that have it. Trajectories of a file may have no report; without
    any there are no metrics.
    """
    reported = [t for t in trajectories if "environment" in t.metadata]
    if not reported:
        return {}
    reports = [t.metadata["environment"] for t in reported]
    own = defaultdict[str, list[float]](list)
    for trajectory, report in zip(reported, reports, strict=True):
        for name, value in report.get("metrics", {}).items():
            own[name].append(value)
        if CACHE_HITS in trajectory.measured:
            own[CACHE_HITS].append(trajectory.measured[CACHE_HITS])
    return {
        "time/env_start_s": _mean([t.measured.get("start_s", 0.0) for t in trajectories]),
        "time/env_step_s": _mean([t.measured.get("step_s", 0.0) for t in trajectories]),
        "time/env_close_s": _mean([t.measured.get("close_s", 0.0) for t in trajectories]),
        "rollout/env_start_retries": sum(report.get("start_retries", 0) for report in reports),
        **gateway_metrics(trajectories),
        **{f"env/{name}": _mean(values) for name, values in sorted(own.items())},
    }


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))
