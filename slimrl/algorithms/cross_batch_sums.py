"""Sums over the tokens of trajectories in other micro-batches, which losses of whole sequences read as values."""

from collections.abc import Sequence

import numpy as np
import torch

from slimrl.algorithms.objective import sequence_terms
from slimrl.algorithms.policy_tokens import LossBatch, policy_tokens, sum_by_trajectory
from slimrl.config.schema.algorithm import AlgorithmConfig
from slimrl.data.packing import MicroBatch

Sums = dict[str, np.ndarray]
"""Sums over tokens by name, float64 [n] each."""


def remote_sums(batch: MicroBatch, logprobs_T: np.ndarray, settings: AlgorithmConfig) -> Sums:
    """The micro-batch's own sums for each of its trajectories.

    Args:
        logprobs_T: log-probs of the targets under the current policy.
    """
    tokens = policy_tokens(torch.from_numpy(logprobs_T), _whole_batch(batch), settings)
    terms = sequence_terms(tokens, settings)
    num = len(batch.trajectories)
    return {
        name: sum_by_trajectory(values_T.double(), tokens.trajectory_ids_T, num).numpy()
        for name, values_T in terms.items()
    }


def set_remote(
    batches: Sequence[MicroBatch], own: Sequence[Sums], everywhere: Sequence[tuple[np.ndarray, Sums]]
) -> None:
    """Set `remote` of this rank's micro-batches.

    Args:
        own: `remote_sums` of each of `batches`.
        everywhere: (trajectories, `remote_sums`) of every micro-batch of all data-parallel ranks, in an order that is
            the same on each rank.
    """
    num = 1 + max((int(of.max()) for of, _ in everywhere if len(of)), default=-1)
    totals: Sums = {name: np.zeros(num, np.float64) for _, sums in everywhere for name in sums}
    for of, sums in everywhere:
        for name, values in sums.items():
            totals[name][of] += values
    for batch, sums in zip(batches, own, strict=True):
        batch.remote = {
            name: (totals[name][batch.trajectories] - values).astype(np.float32) for name, values in sums.items()
        }


def _whole_batch(batch: MicroBatch) -> LossBatch:
    """A micro-batch before it is sliced, without what is elsewhere; copied, since its arrays may not be written."""
    return LossBatch(
        mask_T=torch.tensor(batch.mask),
        trajectory_ids_T=torch.tensor(batch.trajectory_ids, dtype=torch.int64),
        rollout_logprobs_T=torch.tensor(batch.rollout_logprobs),
        added_T={name: torch.tensor(values) for name, values in batch.added.items()},
        num_sampled_N=torch.tensor(batch.num_sampled),
        advantages_N=torch.tensor(batch.advantages),
        remote_N={},
        sum_over_ranks=None,
    )
