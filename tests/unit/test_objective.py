"""Each algorithm's loss against its formula in float64, and its gradient against finite differences of that formula.

The formulas are written here one trajectory and one token at a time, with what a paper holds constant at the point of
the gradient. Tokens that the policy did not sample carry NaN.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from algorithm_cases import CASES, PPO, config

from slimrl.algorithms.cross_batch_sums import remote_sums, set_remote
from slimrl.algorithms.losses import LOSSES
from slimrl.algorithms.objective import denominator, loss_function, policy_objective
from slimrl.algorithms.passes import needs_old, needs_sums
from slimrl.algorithms.policy_tokens import LossBatch
from slimrl.config.algorithms import SETTINGS
from slimrl.config.schema.algorithm import (
    Aggregation,
    AlgorithmConfig,
    AlgorithmName,
    CorrectionConfig,
    CorrectionLevel,
    CorrectionMode,
    KlPlace,
    LossName,
    OldPolicy,
)
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.trainer import LoraConfig, TrainerConfig
from slimrl.data.packing import MicroBatch

LENGTHS = (5, 9, 1, 17, 4, 12, 3)
ENTROPY = 0.01
ADDED = ("old_logprobs", "reference_logprobs")


class Case:
    """Seven trajectories, half of the tokens sampled, one trajectory without any; NaN where nothing was sampled."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.ids = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
        total = len(self.ids)
        self.mask = (rng.random(total) < 0.6) & (self.ids != 2)
        self.engine = -rng.random(total)
        self.old = self.engine + 0.1 * rng.normal(size=total)
        self.new = self.old + 0.15 * rng.normal(size=total)
        self.reference = self.old + 0.3 * rng.normal(size=total)
        self.entropy = rng.random(total)
        self.advantages = rng.normal(size=len(LENGTHS))
        self.counts = np.bincount(self.ids, self.mask, len(LENGTHS)).astype(np.int64)
        for values in (self.engine, self.old, self.new, self.reference, self.entropy):
            values[~self.mask] = np.nan

    def loss(self, settings: AlgorithmConfig, entropy_coef: float, here: np.ndarray, sums=None, remote=None):
        """The objective on some of the tokens, in float64; (log-probs with their gradient, reported sums)."""
        new = torch.from_numpy(self.new[here]).requires_grad_()
        added = (
            {"old_logprobs": self.old, "reference_logprobs": self.reference}
            if settings.kl_coef
            else {"old_logprobs": self.old}
        )
        batch = LossBatch(
            mask_T=torch.from_numpy(self.mask[here]),
            trajectory_ids_T=torch.from_numpy(self.ids[here]),
            rollout_logprobs_T=torch.from_numpy(self.engine[here]),
            added_T={name: torch.from_numpy(values[here]) for name, values in added.items()},
            num_sampled_N=torch.from_numpy(self.counts),
            advantages_N=torch.from_numpy(self.advantages),
            remote_N=remote or {},
            sum_over_ranks=sums,
        )
        found = policy_objective(
            new, torch.from_numpy(self.entropy[here]), batch, settings=settings, entropy_coef=entropy_coef
        )
        found.loss.backward()
        return found, new.grad.numpy()


def formula(case: Case, settings: AlgorithmConfig, new: np.ndarray, entropy_coef: float) -> float:
    """The summed loss, one trajectory at a time; `case.new` is where the gradient is taken."""
    total = 0.0
    for i in range(len(LENGTHS)):
        at = np.flatnonzero((case.ids == i) & case.mask)
        if not len(at):
            continue
        advantage, old = (
            case.advantages[i],
            case.engine[at] if settings.old_policy is OldPolicy.rollout else case.old[at],
        )
        losses = policy_losses(settings, new[at], case.new[at], old, advantage)
        losses = losses * weights(
            settings.correction, case.old[at] - case.engine[at], case.new[at] - case.engine[at], advantage
        )
        if settings.kl_coef and settings.kl_place is KlPlace.loss:
            x = new[at] - case.reference[at]
            k3 = np.exp(-x) - 1 + x
            kl = {"k1": x, "k2": x**2 / 2, "k3": k3, "k3_weighted": np.exp(new[at] - old) * k3}
            losses = losses + settings.kl_coef * kl[settings.kl_estimator.value]
        losses = losses - entropy_coef * case.entropy[at]
        total += losses.mean() if settings.aggregation is Aggregation.trajectory else losses.sum()
    return total


def policy_losses(settings: AlgorithmConfig, new, base, old, advantage: float) -> np.ndarray:
    """Policy losses of one trajectory's tokens; `base` replaces `new` where a paper stops the gradient."""
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    ratio, name = np.exp(new - old), settings.loss
    if name in ("gspo", "gspo_token"):
        s = math.exp((new - old).mean())
        return np.full(len(new), -min(s * advantage, min(max(s, low), high) * advantage))
    if name == "gmpo":
        bounded = np.minimum(ratio, high) if advantage > 0 else np.maximum(ratio, low)
        return np.full(len(new), -advantage * bounded.prod() ** (1 / len(new)))
    if name == "ppo":
        losses = np.maximum(-ratio * advantage, -np.clip(ratio, low, high) * advantage)
        return np.minimum(losses, -settings.dual_clip * advantage) if settings.dual_clip and advantage < 0 else losses
    if name == "cispo":
        return -np.clip(np.exp(base - old), low, high) * advantage * new
    if name == "sapo":
        tau = 1.0 if advantage > 0 else 1.05
        return -4 / tau / (1 + np.exp(-tau * (ratio - 1))) * advantage
    assert name == "gpg"
    return -advantage * new


def weights(correction: CorrectionConfig, gap, drift, advantage: float) -> np.ndarray:
    """Correction weights of one trajectory's tokens."""
    if correction.veto and np.exp(gap).min() < correction.veto:
        return np.zeros(len(gap))
    if correction.max_gap and advantage < 0 and -drift.mean() > correction.max_gap:
        return np.zeros(len(gap))
    if correction.level is CorrectionLevel.off:
        return np.ones(len(gap))
    by_level = {"token": gap, "sequence": np.full(len(gap), gap.sum()), "geometric": np.full(len(gap), gap.mean())}
    found = np.exp(by_level[correction.level.value])
    if correction.mode is CorrectionMode.truncate:
        return np.minimum(found, correction.high)
    if correction.mode is CorrectionMode.clip:
        return np.clip(found, correction.low, correction.high)
    return np.where((found >= correction.low) & (found <= correction.high), found, 0.0)


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_are_those_of_the_formula(name):
    settings, case = CASES[name], Case(3)
    everywhere = np.arange(len(case.ids))
    found, gradient = case.loss(settings, ENTROPY, everywhere)
    assert found.loss.item() == pytest.approx(formula(case, settings, case.new, ENTROPY), rel=1e-12)
    assert found.reported["loss"].item() == found.loss.item()
    for at in everywhere:
        if not case.mask[at]:
            assert gradient[at] == 0
            continue
        up, down = case.new.copy(), case.new.copy()
        up[at] += 1e-6
        down[at] -= 1e-6
        slope = (formula(case, settings, up, ENTROPY) - formula(case, settings, down, ENTROPY)) / 2e-6
        assert gradient[at] == pytest.approx(slope, rel=1e-6, abs=1e-8), at


@pytest.mark.parametrize("name", CASES)
def test_tokens_on_several_ranks_and_in_several_micro_batches_add_up_to_the_whole(name):
    """Dealt to four places, two ranks of two micro-batches each."""
    settings, case = CASES[name], Case(5)
    expected, whole_gradient = case.loss(settings, ENTROPY, np.arange(len(case.ids)))
    place = np.arange(len(case.ids)) % 4
    own = [
        remote_sums(whole_batch(case, settings, place // 2 == b), case.new[place // 2 == b], settings) for b in (0, 1)
    ]
    parts = [remote_sums(whole_batch(case, settings, place == p), case.new[place == p], settings) for p in range(4)]
    gradient, reported = np.zeros(len(case.ids)), dict.fromkeys(expected.reported, 0.0)
    for p in range(4):
        # The sum over ranks is asked for name by name, in the order of the terms.
        both = iter([torch.from_numpy(own[p // 2][term]) for term in parts[p]])
        remote = {term: torch.from_numpy(values) for term, values in own[1 - p // 2].items()}
        found, gradient[place == p] = case.loss(
            settings, ENTROPY, np.flatnonzero(place == p), lambda _, b=both: next(b), remote
        )
        for term, value in found.reported.items():
            reported[term] += value.item()
    np.testing.assert_allclose(gradient, whole_gradient, rtol=1e-9, atol=1e-12)
    assert reported == pytest.approx({term: value.item() for term, value in expected.reported.items()}, rel=1e-9)


def whole_batch(case: Case, settings: AlgorithmConfig, here: np.ndarray) -> MicroBatch:
    added = {"old_logprobs": case.old, "reference_logprobs": case.reference}
    count = int(here.sum())
    return MicroBatch(
        tokens=np.zeros(count, np.int32), targets=np.zeros(count, np.int32), mask=case.mask[here],
        padding=np.zeros(count, np.bool_), position_ids=np.zeros(count, np.int32),
        cu_seqlens=np.array([0, count], np.int32), sequences=np.zeros(1, np.int64),
        trajectory_ids=case.ids[here].astype(np.int32),
        rollout_logprobs=case.engine[here], trajectories=np.arange(len(LENGTHS)), num_sampled=case.counts,
        weight_versions=np.zeros(count, np.int32),
        advantages=case.advantages, added={name: values[here] for name, values in added.items()},
    )  # fmt: skip


def test_sums_elsewhere_are_those_of_all_other_micro_batches():
    case, settings = Case(1), CASES["all of them"]
    batches = [whole_batch(case, settings, case.ids % 3 == b) for b in range(3)]
    for batch in batches:
        batch.trajectories = np.arange(len(LENGTHS)) + 2
    own = [remote_sums(batch, case.new[case.ids % 3 == b], settings) for b, batch in enumerate(batches)]
    set_remote(batches[:1], own[:1], [(batch.trajectories, sums) for batch, sums in zip(batches, own, strict=True)])
    for name, values in batches[0].remote.items():
        np.testing.assert_allclose(values, own[1][name] + own[2][name], rtol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_in_float32_the_value_keeps_six_digits(name):
    settings, case = CASES[name], Case(3)
    expected = formula(case, settings, case.new, ENTROPY)
    for field in ("new", "old", "engine", "reference", "entropy", "advantages"):
        setattr(case, field, getattr(case, field).astype(np.float32))
    found, gradient = case.loss(settings, ENTROPY, np.arange(len(case.ids)))
    assert found.loss.item() == pytest.approx(expected, rel=2e-6, abs=1e-6)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("name", CASES)
def test_a_place_of_padding_alone_adds_nothing_and_still_has_a_gradient(name):
    """As on a data-parallel rank for which no sequence was left: tokens, and no trajectory that they could be of."""
    new = torch.full((8,), torch.nan, requires_grad=True)
    nothing, none = torch.zeros(8, dtype=torch.bool), torch.zeros(0)
    batch = LossBatch(
        mask_T=nothing, trajectory_ids_T=torch.zeros(8, dtype=torch.int64), rollout_logprobs_T=torch.zeros(8),
        added_T={name: torch.full((8,), torch.nan) for name in ADDED}, num_sampled_N=none.long(),
        advantages_N=none, remote_N={}, sum_over_ranks=None,
    )  # fmt: skip
    found = policy_objective(new, new, batch, settings=CASES[name], entropy_coef=ENTROPY)
    found.loss.backward()
    assert found.loss.item() == 0
    assert new.grad.tolist() == [0] * 8
    assert {value.item() for value in found.reported.values()} == {0}


@pytest.mark.parametrize("name", [name.value for name in AlgorithmName])
def test_on_policy_the_gradient_is_the_policy_gradient_of_the_advantages(name):
    """Without a pass for old log-probs: every ratio is 1, nothing is clipped, and the gradient is alive."""
    settings, case = replace(CASES[name], kl_coef=0.0), Case(2)
    new = torch.from_numpy(case.new).requires_grad_()
    batch = LossBatch(
        mask_T=torch.from_numpy(case.mask), trajectory_ids_T=torch.from_numpy(case.ids),
        rollout_logprobs_T=torch.from_numpy(case.engine), added_T={}, num_sampled_N=torch.from_numpy(case.counts),
        advantages_N=torch.from_numpy(case.advantages), remote_N={}, sum_over_ranks=None,
    )  # fmt: skip
    found = policy_objective(new, torch.zeros(len(case.ids)), batch, settings=settings, entropy_coef=0.0)
    found.loss.backward()
    weight = 1 / np.maximum(case.counts, 1) if settings.aggregation is Aggregation.trajectory else np.ones(len(LENGTHS))
    expected = np.where(case.mask, -(case.advantages * weight)[case.ids], 0.0)
    np.testing.assert_allclose(new.grad.numpy(), expected, rtol=1e-12)
    assert found.reported["clipped"].item() == 0
    assert found.reported["kl_old"].item() == pytest.approx(0, abs=1e-12)


def test_what_is_reported_are_counts_and_sums_over_sampled_tokens():
    case, settings = Case(4), CASES["kl k3"]
    found, _ = case.loss(settings, 0.0, np.arange(len(case.ids)))
    reported, at = {name: value.item() for name, value in found.reported.items()}, case.mask
    ratio, x = np.exp(case.new - case.old)[at], (case.new - case.reference)[at]
    importance = np.exp(case.new - case.engine)[at]
    high, low = 1 + settings.clip_high, 1 - settings.clip_low
    advantages = case.advantages[case.ids][at]
    clipped = np.where(advantages > 0, ratio > high, ratio < low) / case.counts[case.ids][at]
    assert reported == pytest.approx(
        {
            "loss": found.loss.item(), "weight": (case.counts > 0).sum(), "clipped": clipped.sum(), "tokens": at.sum(),
            "clamped": 0,
            "kl_old": (ratio - 1 - np.log(ratio)).sum(), "importance": importance.sum(),
            "importance_squared": (importance**2).sum(), "kl": (importance * (np.exp(-x) - 1 + x)).sum(),
        }
    )  # fmt: skip


@pytest.mark.parametrize("name", ["ppo", "kl k2", "kl k3", "kl k3_weighted", "gpg", "gspo"])
def test_log_ratios_beyond_20_are_counted_where_they_lose_their_gradient(name):
    """The first token is 40 nat more likely than it was, at a negative advantage; the second fell by 25. The others of
    its trajectory did not move, and the reference is the old policy."""
    settings, moved = replace(CASES[name], entropy_coef=0.0), np.array([40.0, -25.0, 0.0, 19.0, -19.0, np.nan])
    new = torch.from_numpy(-1.0 + moved).requires_grad_()
    old = torch.where(torch.isnan(new), torch.nan, -torch.ones(6, dtype=torch.float64))
    batch = LossBatch(
        mask_T=~torch.isnan(new), trajectory_ids_T=torch.zeros(6, dtype=torch.int64), rollout_logprobs_T=old,
        added_T={"old_logprobs": old} | ({"reference_logprobs": old} if settings.kl_coef else {}),
        num_sampled_N=torch.tensor([5]), advantages_N=torch.tensor([-0.5], dtype=torch.float64),
        remote_N={}, sum_over_ranks=None,
    )  # fmt: skip
    found = policy_objective(new, torch.zeros(6), batch, settings=settings, entropy_coef=0.0)
    found.loss.backward()
    assert found.reported["clamped"].item() == 2
    assert (new.grad[:2] == 0).all() == (name != "gpg")
    assert new.grad[3] != 0
    assert found.reported["kl_old"].isfinite()


def test_a_reference_20_nat_away_is_counted_where_it_is_in_the_loss():
    for place, expected in ((KlPlace.loss, 2), (KlPlace.reward, 0)):
        settings = replace(CASES["kl k3"], kl_place=place)
        new, reference = torch.full((3,), -1.0), torch.tensor([-21.5, -21.01, -20.9])
        batch = LossBatch(
            mask_T=torch.ones(3, dtype=torch.bool), trajectory_ids_T=torch.zeros(3, dtype=torch.int64),
            rollout_logprobs_T=new, added_T={"old_logprobs": new, "reference_logprobs": reference},
            num_sampled_N=torch.tensor([3]), advantages_N=torch.ones(1), remote_N={}, sum_over_ranks=None,
        )  # fmt: skip
        found = policy_objective(new, torch.zeros(3), batch, settings=settings, entropy_coef=0.0)
        assert found.reported["clamped"].item() == expected


def test_a_masked_nan_of_a_users_loss_is_left_out(monkeypatch):
    """A loss by its import path, which does not mask."""
    case, settings = Case(0), config(loss="toy_loss:unmasked")
    found, gradient = case.loss(settings, 0.0, np.arange(len(case.ids)))
    assert math.isfinite(found.loss.item())
    assert np.isfinite(gradient).all()
    expected = sum(
        (-case.advantages[i] * case.new[(case.ids == i) & case.mask]).mean() for i in range(7) if case.counts[i]
    )
    assert found.loss.item() == pytest.approx(expected)


def test_the_denominator_is_that_of_the_whole_update():
    counts = {"num_trajectories": 3, "num_tokens": 50, "length": 40}
    assert [denominator(kind, **counts) for kind in Aggregation] == [3, 50, 120]


def test_a_sum_elsewhere_is_needed_where_a_sequence_matters_and_is_not_0():
    algorithms = [config(**PPO), config(), CASES["icepop"], CASES["sequences masked"], CASES["vetoed"]]
    assert [needs_sums(one, 0) for one in algorithms] == [False, False, False, True, True]
    assert [needs_sums(one, 1) for one in algorithms] == [False, True, False, True, True]
    # The engine's policy is another one before the first update too.
    against_engine = [config(**settings, old_policy=OldPolicy.rollout) for settings in (PPO, {})]
    assert [needs_sums(one, 0) for one in against_engine] == [False, True]


def test_dropout_of_the_model_or_of_adapters_needs_a_pass_without_it():
    def needs(**trainer) -> bool:
        return needs_old(Recipe(trainer=TrainerConfig(**trainer)), 0)

    assert not needs()
    assert not needs(lora=LoraConfig(dropout=0.1))
    assert not needs(lora=LoraConfig(rank=4))
    assert needs(lora=LoraConfig(rank=4, dropout=0.1))
    assert needs(megatron={"attention_dropout": 0.1})


def test_every_loss_has_a_name_and_every_name_a_loss():
    assert set(LOSSES) == set(LossName)
    assert set(SETTINGS) == set(AlgorithmName)


def test_tokens_of_different_lengths_are_refused():
    case = Case(0)
    batch = LossBatch(
        mask_T=torch.from_numpy(case.mask), trajectory_ids_T=torch.from_numpy(case.ids),
        rollout_logprobs_T=torch.from_numpy(case.engine), added_T={}, num_sampled_N=torch.from_numpy(case.counts),
        advantages_N=torch.from_numpy(case.advantages), remote_N={}, sum_over_ranks=None,
    )  # fmt: skip
    with pytest.raises(ValueError, match="different lengths"):
        loss_function("policy", config())(torch.zeros(3), torch.zeros(3), batch)
