"""Estimators of the KL divergence from the policy to a reference, by sampled token.

With x = log pi - log pi_ref of tokens sampled from pi (http://joschu.net/blog/kl-approx.html).
"""

import torch
from torch import Tensor

from slimrl.algorithms.policy_tokens import MAX_LOG_RATIO
from slimrl.config.schema.algorithm import KlEstimator


def kl(logprobs_T: Tensor, reference_T: Tensor, log_ratio_T: Tensor, estimator: KlEstimator) -> Tensor:
    """The estimator's value and gradient, [T].

    Args:
        log_ratio_T: log pi - log pi_old, the weight of `k3_weighted`.
    """
    x_T = (logprobs_T - reference_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator is KlEstimator.k1:
        return x_T
    if estimator is KlEstimator.k2:
        return x_T.square() / 2
    k3_T = torch.exp(-x_T) - 1 + x_T
    return k3_T * log_ratio_T.exp() if estimator is KlEstimator.k3_weighted else k3_T
