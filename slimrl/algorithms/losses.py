"""Loss functions, each a sum over what lies in one micro-batch.

Whoever calls divides by the global count, so that the result does not depend on how the batch was packed. Values to be
reported are counted by the share of a trajectory's tokens that lie here, so that adding them over micro-batches and
ranks counts each trajectory once.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slimrl.algorithms.ratios import sequence_log_ratio, sum_by_trajectory


@dataclass(frozen=True, kw_only=True, eq=False)
class LossSums:
    """`loss` carries the gradient; `reported` are plain sums without one."""

    loss: Tensor
    reported: dict[str, Tensor]


def gspo_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    mask_T: Tensor,
    trajectory_ids_T: Tensor,
    advantages_N: Tensor,
    num_sampled_N: Tensor,
    elsewhere_log_ratio_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    sum_over_ranks: Callable[[Tensor], Tensor] | None = None,
) -> LossSums:
    """Sum over trajectories of -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A) (GSPO, arXiv:2507.18071, eq. 5).

    s is the length-normalised sequence ratio of `sequence_log_ratio`, whose arguments these are.

    Args:
        advantages_N: float32, one per trajectory.
        clip_low: of order 3e-4; the sequence mean moves far less than a token's ratio.
        clip_high: of order 4e-4.

    Returns:
        `reported` has `loss`, `clipped` and `trajectories`: divided by `trajectories` they are means.
    """
    log_ratio_N = sequence_log_ratio(
        logprobs_T,
        old_logprobs_T,
        mask_T,
        trajectory_ids_T,
        num_sampled_N,
        elsewhere_log_ratio_N,
        sum_over_ranks,
    )
    ratio_N = log_ratio_N.exp()
    clipped_ratio_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    surrogate_N = torch.minimum(ratio_N * advantages_N, clipped_ratio_N * advantages_N)
    local_sampled_N = sum_by_trajectory(mask_T.to(advantages_N.dtype), trajectory_ids_T, len(advantages_N))
    share_N = local_sampled_N / num_sampled_N.clamp(min=1)
    # A trajectory with nothing here would add a constant: no gradient, but a NaN if its remote part is one.
    loss = torch.where(local_sampled_N > 0, -surrogate_N, torch.zeros_like(surrogate_N)).sum()
    with torch.no_grad():
        clipped_N = torch.where(advantages_N > 0, ratio_N > 1 + clip_high, ratio_N < 1 - clip_low) & (advantages_N != 0)
        reported = {
            "loss": (-surrogate_N * share_N).sum(),
            "clipped": (clipped_N * share_N).sum(),
            "trajectories": share_N.sum(),
        }
    return LossSums(loss=loss, reported=reported)


def cross_entropy(logprobs_T: Tensor, mask_T: Tensor) -> LossSums:
    """Sum of -log p over the masked-in tokens; values elsewhere may be NaN. `reported` has `loss` and `tokens`."""
    loss = -torch.where(mask_T, logprobs_T, torch.zeros_like(logprobs_T)).sum()
    return LossSums(loss=loss, reported={"loss": loss.detach(), "tokens": mask_T.sum()})
