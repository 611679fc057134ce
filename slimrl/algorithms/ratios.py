"""Importance ratios of whole trajectories.

T tokens of one micro-batch, N trajectories that have tokens in it. A trajectory may reach beyond the micro-batch: onto
other context-parallel ranks, and into other micro-batches when it has several segments. What lies there enters as a
value without gradient; each place then contributes the gradient of its own tokens, and together they give exactly the
gradient that one rank holding everything would.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def sequence_log_ratio(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    mask_T: Tensor,
    trajectory_ids_T: Tensor,
    num_sampled_N: Tensor,
    elsewhere_log_ratio_N: Tensor,
    sum_over_ranks: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Length-normalised log importance ratio of each trajectory (GSPO, arXiv:2507.18071, eq. 6).

    Args:
        logprobs_T: log pi_theta(y_t | x, y_<t), natural log, float32, differentiable.
        old_logprobs_T: the same under the policy that is being improved; no gradient.
        mask_T: True on tokens that the policy sampled. Values elsewhere may be NaN.
        trajectory_ids_T: int64, which trajectory each token belongs to, 0..N-1.
        num_sampled_N: sampled tokens of the whole trajectory, wherever they lie.
        elsewhere_log_ratio_N: sum of log pi_theta - log pi_old over the trajectory's tokens in other micro-batches.
        sum_over_ranks: adds a tensor [N] over the ranks that hold pieces of these sequences (context parallelism);
            None where this rank holds them whole.

    Returns:
        float32 [N]; 0 for a trajectory without sampled tokens.

    Raises:
        ValueError: the token tensors differ in length.
    """
    lengths = {len(logprobs_T), len(old_logprobs_T), len(mask_T), len(trajectory_ids_T)}
    if len(lengths) != 1:
        raise ValueError(f"token tensors of different lengths: {sorted(lengths)}")
    zero = torch.zeros((), dtype=logprobs_T.dtype, device=logprobs_T.device)
    # The inner `where` keeps a masked NaN out of the subtraction, whose backward would spread it.
    difference_T = torch.where(mask_T, torch.where(mask_T, logprobs_T, zero) - old_logprobs_T, zero)
    local_N = sum_by_trajectory(difference_T, trajectory_ids_T, len(num_sampled_N))
    remote_N = elsewhere_log_ratio_N.to(local_N.dtype)
    if sum_over_ranks is not None:
        remote_N = remote_N + sum_over_ranks(local_N.detach()) - local_N.detach()
    return (local_N + remote_N) / num_sampled_N.clamp(min=1)


def sum_by_trajectory(values_T: Tensor, trajectory_ids_T: Tensor, num_trajectories: int) -> Tensor:
    """Sum of each trajectory's values, [N], differentiable.

    Padding belongs to trajectory 0, with values of 0. A micro-batch of padding alone has no trajectory: its result is
    empty, and still leads a gradient of 0 back to every value, so that a rank that got no sequence takes part in the
    backward pass.
    """
    sums = values_T.new_zeros(max(num_trajectories, 1))
    return sums.index_add(0, trajectory_ids_T, values_T)[:num_trajectories]
