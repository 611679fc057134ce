"""How far the trainer's log-probs of the sampled tokens are from the engine's, and how much routing explains.

A rank reports on each micro-batch, with S sampled tokens; the driver computes the metrics from all reports and from the
micro-batches, which have what the engine said.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import numpy as np

from slimrl.algorithms.policy_tokens import MAX_LOG_RATIO
from slimrl.algorithms.routing import RoutingComparison, compare_routing, routing_metrics
from slimrl.data.packing import MicroBatch
from slimrl.data.training import LogProbs


@dataclass(frozen=True, kw_only=True, eq=False)
class LogProbReport:
    """Log-probs and routing of the sampled tokens of one micro-batch."""

    logprobs_S: np.ndarray
    """float32, the trainer's log-probs of the sampled tokens"""
    entropy_sum: float
    """Sum of the policy's entropy at the sampled tokens"""
    routing: RoutingComparison | None
    """Comparison of the experts; None if engine or trainer reports none"""


def report_logprobs(batch: MicroBatch, found: LogProbs) -> LogProbReport:
    routing = None
    if batch.routed_experts is not None and found.routed_experts is not None:
        assert found.routing_margin is not None, "the trainer reports margins with its experts"
        routing = compare_routing(
            batch.routed_experts, found.routed_experts, found.routing_margin, batch.cu_seqlens, batch.mask
        )
    return LogProbReport(
        logprobs_S=found.logprobs[batch.mask],
        entropy_sum=float(np.sum(found.entropy, where=batch.mask, dtype=np.float64)),
        routing=routing,
    )


FAR = 20
"""Factor on `algorithm.max_logprob_mismatch` beyond which a token's log-probs are far apart. A mean at that limit would
leave room for one such token in 20."""

ANYWAY = 2
"""Number of far tokens that a step may have whatever its size, so that in a small one a single flip of the routing is
none too many."""


def mismatch_metrics(
    reports: Sequence[LogProbReport],
    batches: Sequence[MicroBatch],
    version: int | None = None,
    *,
    limit: float = math.inf,
) -> dict[str, float]:
    """Metrics of a step, from the micro-batches of all its updates.

    `mismatch/kl_k3` estimates KL(engine, trainer), since the tokens are the engine's. Tokens with a log-prob that is
    not finite are left out; where there are no others, a metric is NaN.

    Args:
        batches: those of the reports, in their order.
        version: of the trainer's weights. Log-probs of tokens that others sampled differ for that reason; they are
            metrics of their own. None: all tokens are taken for the trainer's.
        limit: `algorithm.max_logprob_mismatch`, which says how far apart log-probs may be.
    """
    rollout = np.concatenate([batch.rollout_logprobs[batch.mask] for batch in batches])
    trainer = np.concatenate([report.logprobs_S for report in reports])
    versions = np.concatenate([batch.weight_versions[batch.mask] for batch in batches])
    difference = np.abs(trainer.astype(np.float64) - rollout)
    own = np.full(len(versions), True) if version is None else versions == version
    has_own, has_stale = own.any(), not own.all()
    finite = np.isfinite(difference)
    own, stale = own & finite, ~own & finite
    metrics = {}
    if has_own:
        far = int((difference[own] > FAR * limit).sum())
        metrics = {
            "mismatch/logprob_abs_mean": _mean(difference[own]),
            "mismatch/logprob_abs_max": float(difference[own].max()) if own.any() else math.nan,
            "mismatch/kl_k3": _mean(k3(rollout[own], trainer[own])),
            "mismatch/far_fraction": max(0, far - ANYWAY) / max(1, int(own.sum())),
        }
    if has_stale:
        metrics["mismatch/stale_logprob_abs_mean"] = _mean(difference[stale])
        metrics["mismatch/stale_kl_k3"] = _mean(k3(rollout[stale], trainer[stale]))
    routing = [report.routing for report in reports if report.routing is not None]
    if routing:
        metrics |= routing_metrics(routing, difference, own)
    return metrics


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else math.nan


def k3(logprobs_T: np.ndarray, reference_T: np.ndarray) -> np.ndarray:
    """exp(-x) - 1 + x with x = log pi - log pi_ref on tokens sampled from pi (http://joschu.net/blog/kl-approx.html).

    Non-negative, and unbiased for KL(pi, pi_ref).
    """
    x_T = logprobs_T.astype(np.float64) - reference_T.astype(np.float64)
    return np.expm1(-np.maximum(x_T, -MAX_LOG_RATIO)) + x_T


def entropy_mean(reports: Sequence[Sequence[LogProbReport]]) -> float:
    """The policy's entropy per sampled token.

    Args:
        reports: for each update, those of its micro-batches.
    """
    tokens = sum(len(report.logprobs_S) for of_update in reports for report in of_update)
    # Plain additions: `sum` compensates for rounding, which would change the last bits.
    sums = [reduce(add, (report.entropy_sum for report in of_update), 0.0) for of_update in reports]
    return sum(sums) / tokens
