"""Every estimate of a KL divergence against the exact divergence of small distributions.

An expectation is the sum over all tokens, each with the probability of the policy that samples: nothing is drawn.
"""

import numpy as np
import pytest
import torch
from algorithm_cases import config
from torch import Tensor

from slimrl.algorithms.kl import kl
from slimrl.algorithms.mismatch import k3
from slimrl.algorithms.objective import policy_objective
from slimrl.algorithms.policy_tokens import LossBatch
from slimrl.algorithms.token_advantages import kl_rewards
from slimrl.config.schema.algorithm import KlEstimator, KlPlace, OldPolicy

SEEDS = range(4)


def policies(seed: int) -> list[np.ndarray]:
    """Log-probs of five tokens under four policies: engine, old, present, reference."""
    logits = np.random.default_rng(seed).normal(size=(4, 5))
    return list(logits - np.log(np.exp(logits).sum(1, keepdims=True)))


def exact(p: np.ndarray, q: np.ndarray) -> float:
    """KL(p, q) of log-probs."""
    return float((np.exp(p) * (p - q)).sum())


def reported(engine, old, new, reference, **settings) -> list[dict[str, float]]:
    """What an update reports of each token alone."""

    def one(values, token) -> Tensor:
        return torch.from_numpy(values[token : token + 1])

    algorithm = config(loss="ppo", clip_low=0.2, clip_high=0.2, kl_coef=0.1, **settings)
    found = []
    for token in range(len(old)):
        batch = LossBatch(
            mask_T=torch.ones(1, dtype=torch.bool), trajectory_ids_T=torch.zeros(1, dtype=torch.int64),
            rollout_logprobs_T=one(engine, token), num_sampled_N=torch.ones(1, dtype=torch.int64),
            added_T={"old_logprobs": one(old, token), "reference_logprobs": one(reference, token)},
            advantages_N=torch.ones(1, dtype=torch.float64), remote_N={}, sum_over_ranks=None,
        )  # fmt: skip
        sums = policy_objective(one(new, token), torch.zeros(1), batch, settings=algorithm, entropy_coef=0.0).reported
        found.append({name: value.item() for name, value in sums.items()})
    return found


def mean(sampler: np.ndarray, values) -> float:
    return float((np.exp(sampler) * np.array(values)).sum())


@pytest.mark.parametrize("seed", SEEDS)
def test_how_far_the_updates_moved_the_policy_is_the_divergence_from_the_policy_that_sampled(seed):
    engine, old, new, reference = policies(seed)
    found = [one["kl_old"] for one in reported(engine, old, new, reference)]
    assert mean(old, found) == pytest.approx(exact(old, new), rel=1e-12)
    assert min(found) >= 0
    found = [one["kl_old"] for one in reported(engine, old, new, reference, old_policy=OldPolicy.rollout)]
    assert mean(engine, found) == pytest.approx(exact(engine, new), rel=1e-12)


@pytest.mark.parametrize("estimator", [*KlEstimator])
def test_the_divergence_from_the_reference_is_reported_unbiased_whatever_is_trained_on(estimator):
    """Also in later updates, and where the trainer's old policy is not the engine's."""
    engine, old, new, reference = policies(5)
    place = KlPlace.reward if estimator is KlEstimator.k1 else KlPlace.loss
    found = [one["kl"] for one in reported(engine, old, new, reference, kl_estimator=estimator, kl_place=place)]
    assert mean(engine, found) == pytest.approx(exact(new, reference), rel=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_divergence_of_engine_and_trainer_and_the_charge_in_the_reward_are_unbiased(seed):
    engine, old, _, reference = policies(seed)
    assert mean(engine, k3(engine, old)) == pytest.approx(exact(engine, old), rel=1e-12)
    assert mean(old, kl_rewards(old, reference, 0.5)) == pytest.approx(-0.5 * exact(old, reference), rel=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_importance_has_the_mean_1_and_the_second_moment_of_the_policies(seed):
    engine, old, new, reference = policies(seed)
    found = reported(engine, old, new, reference)
    assert mean(engine, [one["importance"] for one in found]) == pytest.approx(1)
    square = (np.exp(2 * new - engine)).sum()
    assert mean(engine, [one["importance_squared"] for one in found]) == pytest.approx(square)


def test_a_token_that_the_policy_dropped_costs_the_nats_that_it_fell():
    """100 equally likely tokens, one of which the updates pushed down by 40 nat: its exponential would be 2e17."""
    old = np.full(100, -np.log(100))
    new = np.where(np.arange(100) == 7, -40, 0) + old
    new -= np.log(np.exp(new).sum())
    found = reported(old, old, new, old)
    assert exact(old, new) == pytest.approx(0.39, rel=1e-3)
    assert mean(old, [one["kl_old"] for one in found]) == pytest.approx(exact(old, new), rel=1e-12)
    assert mean(old, k3(old, new)) == pytest.approx(exact(old, new), rel=1e-12)
    assert mean(old, [one["kl"] for one in found]) == pytest.approx(exact(new, old), rel=1e-12)


def test_a_token_of_almost_no_probability_in_the_sampler_does_not_overflow():
    found = reported(*(np.array([value]) for value in (-900.0, -900.0, 0.0, 0.0)))[0]
    assert np.isfinite(list(found.values())).all()
    assert np.isfinite(k3(np.array([-900.0]), np.array([0.0]))).all()


def test_small_divergences_of_float32_keep_their_digits():
    """Log-probs that differ by 1e-3: a token adds 5e-7, of which a difference of float32 numbers near 1 loses half."""
    old = np.full(2, np.log(0.5), np.float32)
    new = np.log(np.array([0.5005, 0.4995], np.float32))
    d = new.astype(np.float64) - old
    found = reported(old, old, new, old)
    assert [one["kl_old"] for one in found] == pytest.approx(d**2 / 2 + d**3 / 6, rel=1e-6)
    assert [one["kl"] for one in found] == pytest.approx(np.exp(d) * (d**2 / 2 - d**3 / 6), rel=1e-6)


@pytest.mark.parametrize(
    ("estimator", "on_policy", "expected"),
    [
        (KlEstimator.k1, True, lambda pi, ref: torch.zeros(())),
        (KlEstimator.k2, True, lambda pi, ref: (pi.exp() * (pi - ref)).sum()),
        (KlEstimator.k3, True, lambda pi, ref: (ref.exp() * (ref - pi)).sum()),
        (KlEstimator.k3_weighted, True, lambda pi, ref: (pi.exp() * (pi - ref)).sum()),
        (KlEstimator.k3_weighted, False, lambda pi, ref: (pi.exp() * (pi - ref)).sum()),
    ],
)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_expected_gradient_of_an_estimator_is_that_of_the_divergence_it_stands_for(
    seed, estimator, on_policy, expected
):
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(size=5)).requires_grad_()
    reference = torch.from_numpy(rng.normal(size=5)).log_softmax(-1)
    pi = logits.log_softmax(-1)
    old = pi.detach() if on_policy else torch.from_numpy(rng.normal(size=5)).log_softmax(-1)
    (old.exp() * kl(pi, reference, pi - old, estimator)).sum().backward()
    found = logits.grad.clone()
    logits.grad = None
    target = expected(logits.log_softmax(-1), reference)
    if target.requires_grad:
        target.backward()
    wanted = torch.zeros(5, dtype=torch.float64) if logits.grad is None else logits.grad
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
