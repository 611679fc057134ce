"""How far trainer and engine are apart where nothing is replayed: what routing replay is worth."""

from collections.abc import Sequence

from slimrl.algorithms.mismatch import LogProbReport, mismatch_metrics
from slimrl.config.schema.algorithm import AlgorithmConfig, RoutingReplay
from slimrl.data.packing import MicroBatch


def replay_gap_is_due(algorithm: AlgorithmConfig, step: int) -> bool:
    """Whether a step measures the gap: the first one, and then every `replay_gap_every_steps`.

    Args:
        step: from 1.
    """
    every = algorithm.replay_gap_every_steps
    return algorithm.routing_replay is RoutingReplay.rollout and every > 0 and (step - 1) % every == 0


def replay_gap_metrics(reports: Sequence[LogProbReport], batches: Sequence[MicroBatch]) -> dict[str, float]:
    """Metrics of a pass in which all routers chose for themselves, from the reports on its micro-batches, in order."""
    found = mismatch_metrics(reports, batches)
    gap = {"routing/unreplayed_logprob_abs_mean": found["mismatch/logprob_abs_mean"]}
    if "routing/differs_fraction" in found:
        gap["routing/unreplayed_differs_fraction"] = found["routing/differs_fraction"]
    return gap
