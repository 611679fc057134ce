"""Losses of a policy, each by token: T tokens of a micro-batch, N trajectories.

r = exp(log_ratio_T) is the importance ratio of a token, A its advantage. The gradient of each loss at a token is that
of the published formula once the losses of tokens are aggregated (`slimrl/algorithms/objective.py`). A loss of whole
sequences has the same value at each of their tokens.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from slimrl.algorithms.loss_types import PolicyTokens, TokenLosses
from slimrl.algorithms.policy_tokens import by_token
from slimrl.config.import_path import resolve
from slimrl.config.schema.algorithm import AlgorithmConfig, LossName

SAPO_TEMPERATURES = (1.0, 1.05)
"""Temperatures of the gate, for positive and for negative advantages (arXiv:2511.20347): higher ones fall off
faster."""


PolicyLoss = Callable[[PolicyTokens, AlgorithmConfig, Tensor], TokenLosses]
"""Function of (tokens, the recipe's settings, sum of the loss's sequence term over each whole trajectory [N]) that
gives the losses."""


def gspo(tokens: PolicyTokens, settings: AlgorithmConfig, log_ratio_N: Tensor) -> TokenLosses:
    """-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), with s the ratio of the sequence (arXiv:2507.18071, eq. 5).

    log s is the mean log-ratio of the trajectory's sampled tokens (eq. 6). At each token s is multiplied by
    pi / pi without gradient (eq. 13), so that the mean over the tokens has the value and the gradient of eq. 5, and
    advantages may differ by token.
    """
    s_N = (log_ratio_N / tokens.num_sampled_N.clamp(min=1)).exp()
    gradient_T = (tokens.log_ratio_T - tokens.log_ratio_T.detach()).exp()
    return _clipped(by_token(s_N, tokens.trajectory_ids_T) * gradient_T, tokens.advantages_T, settings)


def ppo(tokens: PolicyTokens, settings: AlgorithmConfig, _: Tensor) -> TokenLosses:
    """max(-r A, -clip(r) A) (arXiv:1707.06347, eq. 7); with a dual clip c, at most -c A where A is negative."""
    return _clipped(tokens.log_ratio_T.exp(), tokens.advantages_T, settings, settings.dual_clip)


def cispo(tokens: PolicyTokens, settings: AlgorithmConfig, _: Tensor) -> TokenLosses:
    """-clip(r) A log pi, without a gradient through the clipped ratio (arXiv:2506.13585, eq. 4 and 5)."""
    ratio_T = tokens.log_ratio_T.detach().exp()
    weight_T = ratio_T.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return TokenLosses(loss_T=-weight_T * tokens.advantages_T * tokens.logprobs_T, clipped_T=weight_T != ratio_T)


def gpg(tokens: PolicyTokens, settings: AlgorithmConfig, _: Tensor) -> TokenLosses:
    """-A log pi (arXiv:2504.02546)."""
    loss_T = -tokens.advantages_T * tokens.logprobs_T
    return TokenLosses(loss_T=loss_T, clipped_T=torch.zeros_like(tokens.mask_T))


def sapo(tokens: PolicyTokens, settings: AlgorithmConfig, _: Tensor) -> TokenLosses:
    """-4 / tau sigmoid(tau (r - 1)) A, with tau by the sign of A (arXiv:2511.20347)."""
    positive, negative = SAPO_TEMPERATURES
    like_T = torch.ones_like(tokens.advantages_T)
    tau_T = torch.where(tokens.advantages_T > 0, positive * like_T, negative * like_T)
    gate_T = torch.sigmoid(tau_T * (tokens.log_ratio_T.exp() - 1)) * 4 / tau_T
    return TokenLosses(loss_T=-gate_T * tokens.advantages_T, clipped_T=torch.zeros_like(tokens.mask_T))


def gmpo(tokens: PolicyTokens, settings: AlgorithmConfig, clipped_log_ratio_N: Tensor) -> TokenLosses:
    """-A times the geometric mean of the sequence's clipped token ratios (arXiv:2507.20673, eq. 4).

    As with GSPO, the mean over the tokens has the value and the gradient of the sequence's.
    """
    clipped_T = clipped_log_ratio(tokens, settings)
    mean_N = (clipped_log_ratio_N / tokens.num_sampled_N.clamp(min=1)).exp()
    ratio_T = by_token(mean_N, tokens.trajectory_ids_T) * (clipped_T - clipped_T.detach()).exp()
    return TokenLosses(loss_T=-ratio_T * tokens.advantages_T, clipped_T=clipped_T != tokens.log_ratio_T)


def clipped_log_ratio(tokens: PolicyTokens, settings: AlgorithmConfig) -> Tensor:
    """Log-ratios, bounded above where the advantage is positive and below where it is not, [T]."""
    bounds = torch.log(tokens.log_ratio_T.new_tensor([1 - settings.clip_low, 1 + settings.clip_high]))
    return torch.where(
        tokens.advantages_T > 0, tokens.log_ratio_T.clamp(max=bounds[1]), tokens.log_ratio_T.clamp(min=bounds[0])
    )


def log_ratio(tokens: PolicyTokens, settings: AlgorithmConfig) -> Tensor:
    return tokens.log_ratio_T


LOSSES: dict[LossName, PolicyLoss] = {
    LossName.gspo: gspo,
    LossName.gspo_token: gspo,
    LossName.ppo: ppo,
    LossName.cispo: cispo,
    LossName.gpg: gpg,
    LossName.sapo: sapo,
    LossName.gmpo: gmpo,
}

SEQUENCE_TERMS: dict[str, Callable[[PolicyTokens, AlgorithmConfig], Tensor]] = {LossName.gmpo.value: clipped_log_ratio}
"""What a loss sums over each whole trajectory, by its name, where it is not the log-ratio."""


def load_loss(name: str) -> PolicyLoss:
    """The loss of a recipe, by its name or import path.

    Raises:
        ValueError: the import path leads to no function, or to one of other arguments.
    """
    if name in LossName.__members__:
        return LOSSES[LossName(name)]
    return resolve(name, arguments=("tokens", "settings", "log_ratio_N"))


def _clipped(ratio_T: Tensor, advantages_T: Tensor, settings: AlgorithmConfig, dual_clip: float = 0.0) -> TokenLosses:
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    loss_T = torch.maximum(-ratio_T * advantages_T, -ratio_T.clamp(low, high) * advantages_T)
    clipped_T = torch.where(advantages_T > 0, ratio_T > high, ratio_T < low) & (advantages_T != 0)
    if dual_clip:
        bound_T = torch.where(advantages_T < 0, -dual_clip * advantages_T, torch.inf)
        clipped_T = clipped_T | (loss_T > bound_T)
        loss_T = torch.minimum(loss_T, bound_T)
    return TokenLosses(loss_T=loss_T, clipped_T=clipped_T)
