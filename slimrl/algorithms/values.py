"""Values of a critic: advantages and returns from them (arXiv:1506.02438), and the loss that they are trained with.

The value at a sampled token is what the critic expects of the rest of the trajectory just before that token is sampled.
Tokens that the policy did not sample, prompts and tool results, are no steps of their own. A trajectory's last sampled
token ends it, also if it was truncated: nothing is expected beyond.

S sampled tokens of one whole trajectory in order, T tokens of a micro-batch.
"""

import numpy as np
import torch
from torch import Tensor

from slimrl.algorithms.objective import LossSums
from slimrl.algorithms.policy_tokens import LossBatch
from slimrl.data.packing import RETURNS, VALUES

VARIANCE_ROUNDING = 1e-9
"""A variance up to this fraction of the mean square counts as 0."""


def estimate_advantages(
    rewards_S: np.ndarray, values_S: np.ndarray, *, discount: float, gae_lambda: float
) -> tuple[np.ndarray, np.ndarray]:
    """(advantages, returns), float64 [S] each.

    With d_s = r_s + discount v_s+1 - v_s (v beyond the end is 0): A_s = d_s + discount gae_lambda A_s+1, and the return
    is A_s + v_s.
    """
    following_S = np.append(values_S[1:], 0.0)
    differences_S = rewards_S + discount * following_S - values_S
    advantages_S, later = np.empty(len(values_S), np.float64), 0.0
    for index in range(len(values_S) - 1, -1, -1):
        later = differences_S[index] + discount * gae_lambda * later
        advantages_S[index] = later
    return advantages_S, advantages_S + values_S


def value_objective(values_T: Tensor, _: Tensor, batch: LossBatch, *, value_clip: float) -> LossSums:
    """Sum over the sampled tokens of max((v - R)^2, (v_old + clip(v - v_old) - R)^2) / 2 (arXiv:2005.12729, section 3).

    Args:
        values_T: float32, differentiable; masked ones may be NaN.
        value_clip: bound of v - v_old either way; 0 for (v - R)^2 / 2.

    Returns:
        `reported` has, besides `loss`, sums over the sampled tokens: `tokens`, `clipped` (those whose clipped term is
        the larger one), `value` (v_old), `return`, `return_squared`, `error_squared` (of v_old - R).
    """
    mask_T = batch.mask_T

    def sampled(given_T: Tensor) -> Tensor:
        return torch.where(mask_T, given_T, torch.zeros_like(given_T))

    now_T, old_T, return_T = sampled(values_T), sampled(batch.added_T[VALUES]), sampled(batch.added_T[RETURNS])
    error_T = (now_T - return_T).square()
    bounded_T = error_T
    if value_clip:
        bounded_T = (old_T + (now_T - old_T).clamp(-value_clip, value_clip) - return_T).square()
    losses_T = torch.maximum(error_T, bounded_T)
    loss = losses_T.sum() / 2
    with torch.no_grad():
        # In float64: metrics subtract sums that may be nearly equal.
        exact_T = return_T.double()
        reported = {
            "tokens": mask_T.sum(),
            "clipped": (bounded_T > error_T).sum(),
            "value": old_T.double().sum(),
            "return": exact_T.sum(),
            "return_squared": exact_T.square().sum(),
            "error_squared": (old_T - exact_T).square().sum(),
        }
    return LossSums(loss=loss, losses_T=losses_T.detach() / 2, reported={"loss": loss.detach(), **reported})


def value_metrics(sums: dict[str, float]) -> dict[str, float]:
    """Metrics of a step from the sums of `value_objective` over all of its updates.

    `critic/explained_variance` is 1 - mean (R - v)^2 / var R, or 0 where all returns are equal.
    """
    tokens = sums["tokens"]
    mean, square = sums["return"] / tokens, sums["return_squared"] / tokens
    variance = square - mean**2
    explained = 1 - sums["error_squared"] / tokens / variance if variance > VARIANCE_ROUNDING * square else 0.0
    return {
        "critic/loss": sums["loss"] / tokens,
        "critic/clip_fraction": sums["clipped"] / tokens,
        "critic/value_mean": sums["value"] / tokens,
        "critic/return_mean": mean,
        "critic/explained_variance": explained,
    }
