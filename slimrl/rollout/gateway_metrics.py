"""Metrics of the requests of agents behind the gateway."""

from collections.abc import Sequence

import numpy as np

from slimrl.data.trajectory import Trajectory


def gateway_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Segments of a trajectory, and requests by what became of them; nothing without a gateway."""
    counts = [t.metadata["gateway"] for t in trajectories if "gateway" in t.metadata]
    if not counts:
        return {}
    return {
        "gateway/segments_mean": float(np.mean([one["segments"] for one in counts])),
        **{
            f"gateway/{name}": sum(one[name] for one in counts)
            for name in ("requests", "refused", "abandoned", "repeated", "skipped")
        },
    }
