"""Advantages, ratios, losses and KL against closed forms and float64 references."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from slimrl.algorithms.advantages import group_advantages
from slimrl.algorithms.losses import cross_entropy, gspo_loss, loss_function
from slimrl.algorithms.mismatch import k3
from slimrl.algorithms.selection import zero_variance_groups
from slimrl.config.schema import AlgorithmConfig

CLIP = {"clip_low": 3e-4, "clip_high": 4e-4}


def gspo(logprobs, old_logprobs, mask, ids, advantages, num_sampled, elsewhere, *, sum_over_ranks=None):
    batch = SimpleNamespace(
        added_T={"old_logprobs": old_logprobs}, mask_T=mask, trajectory_ids_T=ids, advantages_N=advantages,
        num_sampled_N=num_sampled, remote_log_ratio_N=elsewhere, sum_over_ranks=sum_over_ranks,
    )  # fmt: skip
    return gspo_loss(logprobs, torch.zeros_like(logprobs), batch, **CLIP)


def test_grpo_advantages_of_a_group_by_hand():
    # rewards 1, 0, 0: mean 1/3, unbiased std sqrt(1/3)
    std = math.sqrt(1 / 3) + 1e-6
    got = group_advantages([1, 0, 0], ["a"] * 3, "grpo")
    assert got == pytest.approx([2 / 3 / std, -1 / 3 / std, -1 / 3 / std])


def test_dr_grpo_and_rloo_by_hand():
    assert group_advantages([1, 0, 0], ["a"] * 3, "dr_grpo") == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    assert group_advantages([1, 0, 0], ["a"] * 3, "rloo") == pytest.approx([1.0, -0.5, -0.5])


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
def test_groups_are_told_by_id_whatever_their_order_and_size(kind):
    rewards, ids = [1, 0, 0.5, 0, 1, 0, 0.25], ["a", "b", "a", "b", "b", "a", "b"]
    mixed = group_advantages(rewards, ids, kind)
    for group in "ab":
        members = [i for i, g in enumerate(ids) if g == group]
        alone = group_advantages([rewards[i] for i in members], [group] * len(members), kind)
        assert mixed[members] == pytest.approx(alone)


def test_equal_rewards_have_zero_advantage_and_are_reported():
    assert group_advantages([0.1] * 3 + [0, 1], ["a"] * 3 + ["b"] * 2, "grpo")[:3].tolist() == [0, 0, 0]
    assert zero_variance_groups([0.1] * 3 + [0, 1], ["a"] * 3 + ["b"] * 2) == {"a"}


def test_a_group_of_one_and_a_nan_reward_are_refused():
    with pytest.raises(ValueError, match="group 'b' has one trajectory"):
        group_advantages([1, 0, 1], ["a", "a", "b"], "grpo")
    with pytest.raises(ValueError, match="not finite at \\[1\\]"):
        group_advantages([1, float("nan")], ["a", "a"], "grpo")


class Case:
    """Seven trajectories of different lengths, half of the tokens sampled, NaN where they were not."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.repeat_interleave(torch.arange(7), torch.tensor([5, 9, 1, 30, 4, 12, 3]))
        total = len(self.ids)
        self.mask = torch.rand(total, generator=generator) < 0.6
        self.mask[self.ids == 2] = False  # a trajectory without sampled tokens
        self.old = -torch.rand(total, generator=generator)
        self.new = self.old + 1e-3 * torch.randn(total, generator=generator)
        self.advantages = torch.randn(7, generator=generator)
        self.new[~self.mask] = float("nan")
        self.old[~self.mask] = float("nan")
        self.counts = torch.zeros(7, dtype=torch.int64).index_add(0, self.ids, self.mask.long())

    def reference(self, new: torch.Tensor) -> torch.Tensor:
        """The formula in float64, one trajectory at a time."""
        loss = torch.zeros((), dtype=torch.float64)
        for i in range(7):
            here = (self.ids == i) & self.mask
            if not here.any():
                continue
            ratio = (new[here].double() - self.old[here].double()).mean().exp()
            advantage = self.advantages[i].double()
            clipped = ratio.clamp(1 - CLIP["clip_low"], 1 + CLIP["clip_high"])
            loss = loss - torch.minimum(ratio * advantage, clipped * advantage)
        return loss


def test_gspo_loss_and_gradient_equal_a_float64_reference():
    case = Case()
    new, ref = case.new.clone().requires_grad_(), case.new.double().requires_grad_()
    sums = gspo(new, case.old, case.mask, case.ids, case.advantages, case.counts, torch.zeros(7))
    sums.loss.backward()
    expected = case.reference(ref)
    expected.backward()
    assert sums.loss.item() == pytest.approx(expected.item(), abs=1e-5)
    assert sums.reported["loss"].item() == pytest.approx(expected.item(), abs=1e-5)
    assert sums.reported["trajectories"].item() == pytest.approx(6)
    assert torch.isfinite(new.grad).all()
    torch.testing.assert_close(new.grad.double(), torch.nan_to_num(ref.grad), atol=1e-6, rtol=1e-5)
    assert (new.grad[~case.mask] == 0).all()
    assert 0 < sums.reported["clipped"].item() < 6


def test_gspo_split_over_places_adds_up_to_the_whole():
    """Tokens dealt to four places, two ranks of two micro-batches each: gradients and reported sums add up."""
    case = Case(1)
    whole = case.new.clone().requires_grad_()
    expected = gspo(whole, case.old, case.mask, case.ids, case.advantages, case.counts, torch.zeros(7))
    expected.loss.backward()
    place = torch.arange(len(case.ids)) % 4
    difference = torch.where(case.mask, case.new - case.old, torch.zeros(()))

    def total(there: torch.Tensor) -> torch.Tensor:
        return torch.zeros(7).index_add(0, case.ids[there], difference[there])

    gradient, reported = torch.zeros_like(case.new), dict.fromkeys(expected.reported, 0.0)
    for p in range(4):
        here, micro_batch = place == p, place // 2 == p // 2
        part = case.new[here].clone().requires_grad_()
        inputs = (part, case.old[here], case.mask[here], case.ids[here], case.advantages, case.counts)
        over_ranks = total(micro_batch)
        sums = gspo(*inputs, total(~micro_batch), sum_over_ranks=lambda _, found=over_ranks: found)
        sums.loss.backward()
        gradient[here] = part.grad
        for name, value in sums.reported.items():
            reported[name] += value.item()
    torch.testing.assert_close(gradient, whole.grad, atol=1e-7, rtol=1e-5)
    assert reported == pytest.approx({name: value.item() for name, value in expected.reported.items()}, abs=1e-5)


def test_a_trajectory_counts_as_clipped_where_the_bound_on_its_advantage_s_side_is_passed():
    ratio = torch.tensor([1.01, 1.01, 0.99, 0.99, 1.01, 0.99])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0, 0.0])
    ones, ids = torch.ones(6, dtype=torch.int64), torch.arange(6)
    sums = gspo(ratio.log(), torch.zeros(6), ones.bool(), ids, advantages, ones, torch.zeros(6))
    assert sums.reported["clipped"].item() == 2


def test_the_recipe_says_which_loss_it_is_and_how_far_ratios_may_go():
    settings = AlgorithmConfig(clip_low=0.25, clip_high=0.5)
    assert loss_function("policy", settings).keywords == {"clip_low": 0.25, "clip_high": 0.5}
    assert loss_function("sft", settings) is cross_entropy


def test_a_place_of_padding_alone_adds_nothing_and_still_has_a_gradient():
    """As on a data-parallel rank for which no sequence was left: tokens, and no trajectory that they could be of."""
    logprobs = torch.full((8,), -2.0, requires_grad=True)
    nothing, ids = torch.zeros(8, dtype=torch.bool), torch.zeros(8, dtype=torch.int64)
    none = torch.zeros(0)
    sums = gspo(logprobs, torch.full((8,), torch.nan), nothing, ids, none, none.long(), none)
    sums.loss.backward()
    assert sums.loss.item() == 0
    assert logprobs.grad.tolist() == [0] * 8
    assert {name: value.item() for name, value in sums.reported.items()} == {"loss": 0, "clipped": 0, "trajectories": 0}


def test_the_ratio_is_one_and_the_gradient_alive_on_policy():
    case = Case(2)
    new = case.old.clone().requires_grad_()
    sums = gspo(new, case.old, case.mask, case.ids, case.advantages, case.counts, torch.zeros(7))
    sums.loss.backward()
    sampled = case.counts > 0
    assert sums.loss.item() == pytest.approx(-case.advantages[sampled].sum().item(), abs=1e-6)
    per_token = -(case.advantages / case.counts.clamp(min=1))[case.ids]
    torch.testing.assert_close(new.grad, torch.where(case.mask, per_token, torch.zeros(())))


def test_lengths_that_differ_are_refused():
    case = Case()
    with pytest.raises(ValueError, match="different lengths"):
        gspo(case.new[:-1], case.old, case.mask, case.ids, case.advantages, case.counts, torch.zeros(7))


def test_cross_entropy_ignores_masked_nans():
    logprobs = torch.tensor([-1.0, float("nan"), -2.5], requires_grad=True)
    batch = SimpleNamespace(mask_T=torch.tensor([True, False, True]))
    sums = cross_entropy(logprobs, torch.zeros(3), batch)
    sums.loss.backward()
    assert sums.loss.item() == 3.5
    assert logprobs.grad.tolist() == [-1, 0, -1]


def test_k3_expects_the_kl_divergence_of_two_known_distributions():
    """Over all outcomes, each weighed with its probability, in place of samples."""
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.4, 0.2])
    estimate = k3(np.log(p), np.log(q))
    assert (estimate >= 0).all()
    assert (p * estimate).sum() == pytest.approx((p * np.log(p / q)).sum(), rel=1e-12)


def test_k3_of_one_token_is_its_formula_and_far_ratios_are_clamped():
    """exp(-x) - 1 + x at x = 1 and x = -1; an x of -50 counts as -20."""
    estimate = k3(np.float32([-1.0, -2.0, -50.0, -1.0]), np.float32([-2.0, -1.0, 0.0, -1.0]))
    assert estimate == pytest.approx([1 / np.e, np.e - 2, np.exp(20) - 21, 0.0], rel=1e-12)
