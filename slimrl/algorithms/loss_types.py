"""What a policy loss gets and returns. T tokens of a micro-batch, N trajectories.

torch is not imported, so that a task's module which names these types imports fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyTokens:
    """What a loss reads: values of the sampled tokens; all are 0 elsewhere, where the inputs may be NaN."""

    mask_T: Tensor
    """bool, whether the policy sampled the token"""
    trajectory_ids_T: Tensor
    """int64, 0..N-1, index of the token's trajectory"""
    logprobs_T: Tensor
    """log pi of the policy that is trained, differentiable"""
    old_T: Tensor
    """log pi_old, of the policy before the rollout's first update"""
    engine_T: Tensor
    """log pi_engine, of the policy that sampled"""
    log_ratio_T: Tensor
    """log pi - log pi_old, clamped to 20, differentiable"""
    engine_gap_T: Tensor
    """log pi_trainer - log pi_engine under the weights before the rollout's first update, clamped to 20"""
    drift_T: Tensor
    """log pi - log pi_engine, clamped to 20"""
    reference_T: Tensor | None
    """log pi_ref, of the reference policy; None without a reference"""
    advantages_T: Tensor
    num_sampled_N: Tensor
    """int64, sampled tokens of each whole trajectory"""


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenLosses:
    """What a loss returns, by token; meaningless where the policy did not sample."""

    loss_T: Tensor
    """float, loss of each token, with the gradient"""
    clipped_T: Tensor
    """bool, tokens whose ratio passed the bound on the side of their advantage"""
