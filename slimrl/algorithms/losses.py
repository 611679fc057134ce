"""Loss functions and importance ratios. A loss is a sum over one micro-batch.

The caller divides by the global count, so the result does not depend on how the batch was packed. A trajectory counts
in the reported values by the fraction of its sampled tokens that lie in the micro-batch on this rank. Added over
micro-batches and ranks, each trajectory counts once.

T tokens of one micro-batch, N trajectories that have tokens in it. A trajectory may reach beyond the micro-batch: onto
other context-parallel ranks, and into other micro-batches if it has several segments. Tokens there enter the ratio of
the trajectory as a value without gradient. Each rank and micro-batch contributes the gradient of its own tokens; their
sum is the gradient that one rank with all tokens would compute.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from slimrl.config.schema import AlgorithmConfig
from slimrl.data.packing import OLD_LOGPROBS, MicroBatch

ObjectiveName = Literal["policy", "sft"]
"""What an update optimizes: `policy` the recipe's algorithm, `sft` the likelihood of the tokens in the loss mask."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LossBatch:
    """What a loss reads of a micro-batch: T tokens of this rank, N trajectories. Fields as in MicroBatch."""

    mask_T: Tensor
    trajectory_ids_T: Tensor
    added_T: dict[str, Tensor]
    num_sampled_N: Tensor
    advantages_N: Tensor
    remote_log_ratio_N: Tensor
    sum_over_ranks: Callable[[Tensor], Tensor] | None
    """Adds a tensor over the context-parallel ranks; None if this rank holds all tokens"""


@dataclass(frozen=True, kw_only=True, eq=False)
class LossSums:
    """`loss` has a gradient, `reported` has none."""

    loss: Tensor
    reported: dict[str, Tensor]


LossFunction = Callable[[Tensor, Tensor, LossBatch], LossSums]
"""(log-probs [T], entropy [T], batch) to sums, which the caller adds over micro-batches and ranks."""


def loss_function(name: ObjectiveName, settings: AlgorithmConfig) -> LossFunction:
    """Divide the sums of `policy` by the number of trajectories, those of `sft` by the number of unmasked tokens."""
    if name == "sft":
        return cross_entropy
    return partial(gspo_loss, clip_low=settings.clip_low, clip_high=settings.clip_high)


def gspo_loss(
    logprobs_T: Tensor, entropy_T: Tensor, batch: LossBatch, *, clip_low: float, clip_high: float
) -> LossSums:
    """Sum over trajectories of -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A) (GSPO, arXiv:2507.18071, eq. 5).

    s is the length-normalised sequence ratio of `sequence_log_ratio`.

    Args:
        logprobs_T, batch: see `sequence_log_ratio`.
        clip_low: about 3e-4, as a sequence's ratio moves far less than a token's.
        clip_high: about 4e-4.

    Returns:
        `reported` has `loss`, `clipped` and `trajectories`; divide by `trajectories` for the means.
    """
    mask_T, trajectory_ids_T, advantages_N = batch.mask_T, batch.trajectory_ids_T, batch.advantages_N
    ratio_N = sequence_log_ratio(logprobs_T, batch).exp()
    clipped_ratio_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    surrogate_N = torch.minimum(ratio_N * advantages_N, clipped_ratio_N * advantages_N)
    local_sampled_N = sum_by_trajectory(mask_T.to(advantages_N.dtype), trajectory_ids_T, len(advantages_N))
    local_fraction_N = local_sampled_N / batch.num_sampled_N.clamp(min=1)
    # A trajectory without local tokens would add a constant: no gradient, but a NaN if its remote part is NaN.
    loss = torch.where(local_sampled_N > 0, -surrogate_N, torch.zeros_like(surrogate_N)).sum()
    with torch.no_grad():
        clipped_N = torch.where(advantages_N > 0, ratio_N > 1 + clip_high, ratio_N < 1 - clip_low) & (advantages_N != 0)
        reported = {
            "loss": (-surrogate_N * local_fraction_N).sum(),
            "clipped": (clipped_N * local_fraction_N).sum(),
            "trajectories": local_fraction_N.sum(),
        }
    return LossSums(loss=loss, reported=reported)


def cross_entropy(logprobs_T: Tensor, entropy_T: Tensor, batch: LossBatch) -> LossSums:
    """Sum of -log p over unmasked tokens; masked values may be NaN. `reported` has `loss` and `tokens`."""
    mask_T = batch.mask_T
    loss = -torch.where(mask_T, logprobs_T, torch.zeros_like(logprobs_T)).sum()
    return LossSums(loss=loss, reported={"loss": loss.detach(), "tokens": mask_T.sum()})


def sequence_log_ratio(logprobs_T: Tensor, batch: LossBatch) -> Tensor:
    """Length-normalised log importance ratio of each trajectory (GSPO, arXiv:2507.18071, eq. 6).

    Args:
        logprobs_T: log pi_theta(y_t | x, y_<t), natural log, float32, differentiable; masked values may be NaN.
        batch: with the old log-probs, which are the same under the policy before the rollout's first update.

    Returns:
        float32 [N]; 0 for a trajectory without sampled tokens.

    Raises:
        ValueError: the token tensors differ in length.
    """
    mask_T, trajectory_ids_T, old_logprobs_T = batch.mask_T, batch.trajectory_ids_T, batch.added_T[OLD_LOGPROBS]
    lengths = {len(logprobs_T), len(old_logprobs_T), len(mask_T), len(trajectory_ids_T)}
    if len(lengths) != 1:
        raise ValueError(f"token tensors of different lengths: {sorted(lengths)}")
    zero = torch.zeros((), dtype=logprobs_T.dtype, device=logprobs_T.device)
    # The inner `where` keeps a masked NaN out of the subtraction, whose backward would spread it.
    difference_T = torch.where(mask_T, torch.where(mask_T, logprobs_T, zero) - old_logprobs_T, zero)
    local_N = sum_by_trajectory(difference_T, trajectory_ids_T, len(batch.num_sampled_N))
    remote_N = batch.remote_log_ratio_N.to(local_N.dtype)
    if batch.sum_over_ranks is not None:
        remote_N = remote_N + batch.sum_over_ranks(local_N.detach()) - local_N.detach()
    return (local_N + remote_N) / batch.num_sampled_N.clamp(min=1)


def sum_by_trajectory(values_T: Tensor, trajectory_ids_T: Tensor, num_trajectories: int) -> Tensor:
    """Sum of each trajectory's values, [N], differentiable.

    Padding has the id of trajectory 0 and values of 0. A micro-batch of padding alone has no trajectory: the result is
    empty, but its gradient of 0 reaches every value, so a rank without sequences takes part in the backward pass.
    """
    sums = values_T.new_zeros(max(num_trajectories, 1))
    return sums.index_add(0, trajectory_ids_T, values_T)[:num_trajectories]


def log_ratio_sums(batch: MicroBatch, logprobs_T: np.ndarray) -> np.ndarray:
    """Sum of log pi - log pi_old over the micro-batch's tokens of each of its trajectories, float64 [n].

    Args:
        logprobs_T: log-probs of the targets under the current policy.
    """
    difference_T = np.where(batch.mask, logprobs_T - batch.added[OLD_LOGPROBS], 0).astype(np.float64)
    num = len(batch.trajectories)
    return np.bincount(batch.trajectory_ids, difference_T, minlength=num)[:num]


def set_remote_log_ratio(
    batches: Sequence[MicroBatch], own: Sequence[np.ndarray], everywhere: Sequence[tuple[np.ndarray, np.ndarray]]
) -> None:
    """Set `remote_log_ratio` of this rank's micro-batches.

    Args:
        own: `log_ratio_sums` of each of `batches`.
        everywhere: (trajectories, `log_ratio_sums`) of every micro-batch of all data-parallel ranks, in an order that
            is the same on each rank.
    """
    totals_N = np.zeros(1 + max((int(of.max()) for of, _ in everywhere if len(of)), default=-1), np.float64)
    for of, sums in everywhere:
        totals_N[of] += sums
    for batch, sums in zip(batches, own, strict=True):
        batch.remote_log_ratio = (totals_N[batch.trajectories] - sums).astype(np.float32)
