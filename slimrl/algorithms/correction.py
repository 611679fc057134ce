"""Off-policy correction: weights for the difference between the policy that sampled and the one that is trained.

With u = log pi_old - log pi_engine of a sampled token, where pi_old is the trainer's before the rollout's first update.
Engine and trainer differ in rounding, precision and routing, and in their weights where rollouts run ahead. The weights
multiply the policy's loss; they have no gradient. T tokens, N trajectories.
"""

import math

import torch
from torch import Tensor

from slimrl.algorithms.loss_types import PolicyTokens
from slimrl.algorithms.policy_tokens import MAX_LOG_RATIO, by_token
from slimrl.config.schema.algorithm import AlgorithmConfig, CorrectionConfig, CorrectionLevel, CorrectionMode


def correction_terms(tokens: PolicyTokens, settings: AlgorithmConfig) -> dict[str, Tensor]:
    """What the weights need summed over each whole trajectory, [T] each."""
    correction, terms = settings.correction, {}
    if correction.level in (CorrectionLevel.sequence, CorrectionLevel.geometric):
        terms["engine_gap"] = tokens.engine_gap_T
    if correction.veto > 0:
        terms["vetoed"] = (tokens.engine_gap_T < math.log(correction.veto)).to(tokens.engine_gap_T.dtype)
    if correction.max_gap > 0:
        terms["drift"] = tokens.drift_T
    return terms


def correction_weights(tokens: PolicyTokens, settings: AlgorithmConfig, sums_N: dict[str, Tensor]) -> Tensor:
    """The weight of each token, float [T] without gradient.

    Level, mode and bounds: arXiv:2505.24034 (truncated), https://fengyao.notion.site/off-policy-rl (by level),
    arXiv:2510.18855 (masked, IcePop); `max_gap`: arXiv:2512.02556, eq. 9.

    Args:
        sums_N: of `correction_terms`, over each whole trajectory.
    """
    correction, ids_T = settings.correction, tokens.trajectory_ids_T
    weights_T = torch.ones_like(tokens.engine_gap_T)
    if correction.level is CorrectionLevel.token:
        weights_T = _bounded(tokens.engine_gap_T, correction)
    elif correction.level is CorrectionLevel.sequence:
        weights_T = by_token(_bounded(sums_N["engine_gap"], correction), ids_T)
    elif correction.level is CorrectionLevel.geometric:
        weights_T = by_token(_bounded(sums_N["engine_gap"] / tokens.num_sampled_N.clamp(min=1), correction), ids_T)
    if correction.veto > 0:
        weights_T = torch.where(by_token(sums_N["vetoed"], ids_T) > 0, 0.0, weights_T)
    if correction.max_gap > 0:
        gap_N = -sums_N["drift"] / tokens.num_sampled_N.clamp(min=1)
        left_out_T = (by_token(gap_N, ids_T) > correction.max_gap) & (tokens.advantages_T < 0)
        weights_T = torch.where(left_out_T, 0.0, weights_T)
    return weights_T.detach()


def _bounded(log_weights: Tensor, correction: CorrectionConfig) -> Tensor:
    weights = log_weights.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if correction.mode is CorrectionMode.truncate:
        return weights.clamp(max=correction.high)
    if correction.mode is CorrectionMode.clip:
        return weights.clamp(correction.low, correction.high)
    return torch.where((weights < correction.low) | (weights > correction.high), 0.0, weights)
