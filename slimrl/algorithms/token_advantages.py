"""Advantages that differ by token: S sampled tokens of one whole trajectory, in order.

Computed after the passes that they need, where the tokens are; the driver knows the advantages of trajectories and
turns alone.
"""

import numpy as np

from slimrl.config.schema.algorithm import AdvantageName, AlgorithmConfig, KlPlace

WHITENING_EPSILON = 1e-8
"""Smallest variance that whitening divides by."""


def has_token_advantages(settings: AlgorithmConfig) -> bool:
    """Whether the advantages of a trajectory's tokens differ for another reason than their turns."""
    by_value = settings.advantage == AdvantageName.gae
    return by_value or settings.whiten or settings.teacher_coef > 0 or charges_kl(settings)


def charges_kl(settings: AlgorithmConfig) -> bool:
    """Whether the KL to the reference is subtracted from rewards."""
    return settings.kl_coef > 0 and settings.kl_place is KlPlace.reward


def kl_returns(old_S: np.ndarray, reference_S: np.ndarray, coefficient: float) -> np.ndarray:
    """What each token is charged for itself and for all later ones (arXiv:2501.03262, eq. 7), float64 [S].

    The reward of a token is -coefficient (log pi_old - log pi_ref), and its return the sum from it to the end.

    Args:
        old_S, reference_S: log-probs of the sampled tokens.
    """
    return np.cumsum(kl_rewards(old_S, reference_S, coefficient)[::-1])[::-1]


def kl_rewards(old_S: np.ndarray, reference_S: np.ndarray, coefficient: float) -> np.ndarray:
    """The reward of each token for being near the reference, float64 [S]."""
    return -coefficient * (old_S - reference_S)


def whitening_deviation(count: float, squares: float) -> float:
    """The standard deviation that the advantages of all tokens of a rollout are divided by.

    Args:
        squares: sum of the squared differences from the mean.
    """
    return float(np.sqrt(max(squares / count, WHITENING_EPSILON)))
