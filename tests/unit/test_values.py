"""Generalised advantages and the value loss, against closed forms in float64 and finite differences."""

import numpy as np
import pytest
import torch

from slimrl.algorithms.policy_tokens import LossBatch
from slimrl.algorithms.values import estimate_advantages, value_metrics, value_objective
from slimrl.observability.metrics import is_metric

MASK = torch.arange(24) % 3 > 0


def random_trajectory(length: int = 7) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(length)
    return rng.normal(size=length), rng.normal(size=length)


@pytest.mark.parametrize(("discount", "gae_lambda"), [(1.0, 1.0), (0.9, 0.7), (0.8, 0.0), (1.0, 0.95)])
def test_advantages_are_decayed_sums_of_temporal_differences(discount, gae_lambda):
    rewards, values = random_trajectory()
    following = [*values[1:], 0.0]
    differences = [r + discount * later - v for r, later, v in zip(rewards, following, values, strict=True)]
    expected = [
        sum((discount * gae_lambda) ** (k - s) * differences[k] for k in range(s, len(rewards)))
        for s in range(len(rewards))
    ]
    advantages, returns = estimate_advantages(rewards, values, discount=discount, gae_lambda=gae_lambda)
    np.testing.assert_allclose(advantages, expected, rtol=1e-12)
    np.testing.assert_allclose(returns, expected + values, rtol=1e-12)


def test_with_lambda_1_returns_are_the_rewards_to_come_whatever_the_values():
    rewards, values = random_trajectory()
    _, returns = estimate_advantages(rewards, values, discount=1.0, gae_lambda=1.0)
    np.testing.assert_allclose(returns, np.cumsum(rewards[::-1])[::-1], rtol=1e-12)


def values_of(seed: int) -> torch.Tensor:
    made = torch.from_numpy(np.random.default_rng(seed).normal(size=len(MASK)))
    return torch.where(MASK, made, torch.nan)


def loss_of(values_T: torch.Tensor, value_clip: float):
    added = {"values": values_of(1), "returns": values_of(2)}
    count = int(MASK.sum())
    batch = LossBatch(
        mask_T=MASK, trajectory_ids_T=torch.zeros(len(MASK), dtype=torch.long), rollout_logprobs_T=values_T.detach(),
        added_T=added, num_sampled_N=torch.tensor([count]), advantages_N=torch.zeros(1), remote_N={},
        sum_over_ranks=None,
    )  # fmt: skip
    return value_objective(values_T, torch.zeros_like(values_T), batch, value_clip=value_clip)


@pytest.mark.parametrize("value_clip", [0.0, 0.3])
def test_the_value_loss_and_its_gradient_with_masked_nan(value_clip):
    now = values_of(3).requires_grad_()
    sums = loss_of(now, value_clip)
    old, wanted = values_of(1)[MASK].tolist(), values_of(2)[MASK].tolist()
    expected = clipped = 0.0
    for v, o, r in zip(values_of(3)[MASK].tolist(), old, wanted, strict=True):
        bounded = o + min(max(v - o, -value_clip), value_clip) if value_clip else v
        expected += max((v - r) ** 2, (bounded - r) ** 2) / 2
        clipped += (bounded - r) ** 2 > (v - r) ** 2
    assert sums.loss.item() == pytest.approx(expected, rel=1e-12)
    assert float(sums.reported["clipped"]) == clipped
    assert (clipped > 0) == bool(value_clip)
    sums.loss.backward()
    assert now.grad is not None
    assert not now.grad[~MASK].any()
    for place in range(len(MASK)):
        step = torch.zeros_like(now)
        step[place] = 1e-6
        ahead, behind = (float(loss_of((now + sign * step).detach(), value_clip).loss) for sign in (1, -1))
        assert float(now.grad[place]) == pytest.approx((ahead - behind) / 2e-6, abs=1e-7)


def test_metrics_are_means_over_tokens_and_the_variance_that_values_explain():
    old, wanted = values_of(1)[MASK].numpy(), values_of(2)[MASK].numpy()
    sums = {name: float(value) for name, value in loss_of(values_of(3), 0.3).reported.items()}
    found = value_metrics(sums)
    assert all(map(is_metric, found))
    assert found["critic/value_mean"] == pytest.approx(old.mean())
    assert found["critic/return_mean"] == pytest.approx(wanted.mean())
    assert found["critic/explained_variance"] == pytest.approx(1 - np.square(wanted - old).mean() / wanted.var())
    equal = {name: float(value) for name, value in of_equal_returns().items()}
    assert value_metrics(equal)["critic/explained_variance"] == 0.0


def of_equal_returns() -> dict[str, torch.Tensor]:
    """Returns that are alike, of a value that float32 rounds."""
    tokens = 20_000
    everywhere = torch.ones(tokens, dtype=torch.bool)
    added = {"values": torch.full((tokens,), 0.1), "returns": torch.full((tokens,), 0.3)}
    batch = LossBatch(
        mask_T=everywhere, trajectory_ids_T=torch.zeros(tokens, dtype=torch.long),
        rollout_logprobs_T=torch.zeros(tokens), added_T=added, num_sampled_N=torch.tensor([tokens]),
        advantages_N=torch.zeros(1), remote_N={}, sum_over_ranks=None,
    )  # fmt: skip
    return value_objective(added["values"], torch.zeros(tokens), batch, value_clip=0.0).reported
