"""Estimators of a KL divergence from log-probs of sampled tokens (http://joschu.net/blog/kl-approx.html)."""

import numpy as np

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this before exp."""


def k3(logprobs_T: np.ndarray, reference_T: np.ndarray) -> np.ndarray:
    """exp(-x) - 1 + x with x = log pi - log pi_ref on tokens sampled from pi.

    Non-negative, and unbiased for KL(pi, pi_ref).
    """
    x_T = np.clip(logprobs_T.astype(np.float64) - reference_T.astype(np.float64), -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return np.exp(-x_T) - 1 + x_T
