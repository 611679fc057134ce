"""Estimators of KL divergences, by sampled token (http://joschu.net/blog/kl-approx.html).

`kl` is the one that is trained on. The other two are reported: unbiased for samples of the policy that they name,
float64 since small divergences are differences of nearly equal numbers, and bounded where exp would overflow.
"""

import torch
from torch import Tensor

from slimrl.algorithms.policy_tokens import MAX_LOG_RATIO
from slimrl.config.schema.algorithm import KlEstimator


def kl(logprobs_T: Tensor, reference_T: Tensor, log_ratio_T: Tensor, estimator: KlEstimator) -> Tensor:
    """The estimator of KL(pi, pi_ref), value and gradient, [T]; x = log pi - log pi_ref of tokens sampled from pi.

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


def kl_from_sampler(sampler_T: Tensor, logprobs_T: Tensor) -> Tensor:
    """exp(d) - 1 - d with d = log pi - log pi_sampler, float64 [T]: unbiased for KL(sampler, pi), never negative.

    A token that pi no longer gives costs as many nats as its log-prob fell, and not their exponential.
    """
    d_T = logprobs_T.double() - sampler_T.double()
    return torch.expm1(d_T.clamp(max=MAX_LOG_RATIO)) - d_T


def weighted_kl(logprobs_T: Tensor, reference_T: Tensor, sampler_T: Tensor) -> Tensor:
    """w (exp(-x) - 1 + x) with x = log pi - log pi_ref and w = pi / pi_sampler, float64 [T].

    Unbiased for KL(pi, pi_ref). Multiplied out, since w is small where exp(-x) is large.
    """
    x_T = logprobs_T.double() - reference_T.double()
    d_T = logprobs_T.double() - sampler_T.double()
    weight_T = d_T.clamp(max=MAX_LOG_RATIO).exp()
    return (d_T - x_T).clamp(max=MAX_LOG_RATIO).exp() + weight_T * (x_T - 1)
