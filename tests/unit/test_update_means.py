"""Means of an update over all of its trajectories, whichever of them its passes leave out.

The gradient of every token against a closed form in float64: with A the advantage of its trajectory, r the ratio and n
the trajectory's sampled tokens, it is -A r / (n N) where an update is a mean over N trajectories, -A r / (sum of all n)
where it is one over tokens and -A r / (N length) with a constant length. Trajectories with an advantage of 0 count too.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from slimrl.algorithms.objective import denominator, policy_objective
from slimrl.algorithms.passes import skips_zero_variance
from slimrl.algorithms.policy_tokens import LossBatch
from slimrl.algorithms.selection import select
from slimrl.config.algorithms import SETTINGS
from slimrl.config.schema.algorithm import Aggregation, AlgorithmConfig, AlgorithmName, KlPlace
from slimrl.config.schema.credit import CreditConfig, CreditName, SelectionConfig, SelectionMode
from slimrl.config.schema.recipe import Recipe
from slimrl.data.packing import micro_batches
from slimrl.data.trajectory import Segment, Status, Trajectory
from slimrl.runtime.cluster import exchange, rank_batches
from slimrl.runtime.cluster.rank_batches import RankBatches
from slimrl.runtime.packed_updates import Update, make_updates

LAYOUT = SimpleNamespace(alignment=4, data=2, micro_batch_multiple=1)
LENGTH, SAMPLES = 60, 4
WIDE = {"loss": "ppo", "clip_low": 1.0, "clip_high": 9.0}
"""Nothing is clipped."""


def moved(token) -> np.ndarray:
    """log pi - log pi_old, by the token's id."""
    return 0.3 * np.sin(np.asarray(token, np.float64))


def distance(token) -> np.ndarray:
    """log pi - log pi_ref."""
    return 0.5 * np.cos(2.0 * np.asarray(token, np.float64))


def batch_of(seed: int, num_solved: int, num_mixed: int) -> list[Trajectory]:
    """Groups in random order, each token with an id of its own; some trajectories have two segments."""
    rng, number, found = np.random.default_rng(seed), 1, []
    kinds = rng.permutation([True] * num_solved + [False] * num_mixed)
    for group, solved in enumerate(kinds):
        for sample in range(SAMPLES):
            segments = []
            for _ in range(int(rng.integers(1, 3))):
                length = int(rng.integers(5, 30))
                mask = rng.random(length) < 0.6
                mask[:2], mask[-1] = False, True
                segment = Segment.not_sampled(np.arange(number, number + length), mask)
                turns = np.where(mask, 0, -1).astype(np.int16)
                segments.append(replace(segment, rollout_logprobs=np.full(length, -1, np.float32), turn_ids=turns))
                number += length
            found.append(
                Trajectory(
                    group_id=f"g{group}", trajectory_id=f"g{group}/{sample}", segments=segments,
                    status=Status.completed, reward=1.0 if solved else float(sample % 3 == 0),
                )
            )  # fmt: skip
    return found


def recipe(updates: int = 1, **algorithm) -> Recipe:
    made = Recipe()
    made.algorithm = AlgorithmConfig(max_logprob_mismatch=1.0, **(WIDE | algorithm))
    made.trainer.updates_per_rollout, made.trainer.max_tokens_per_rank = updates, 64
    return made


def updates_of(batch: list[Trajectory], settings: Recipe) -> list[Update]:
    chosen = select(batch, settings.algorithm, lambda group: True, step=1)
    return make_updates(chosen, settings, LAYOUT)


def gradients(update: Update, settings: Recipe, entropy_coef: float = 0.0) -> dict[int, float]:
    """By token id, of the loss of the whole update; entropies are the log-probs times 0.1."""
    algorithm, found = settings.algorithm, {}
    by = denominator(
        algorithm.aggregation, num_trajectories=update.num_trajectories, num_tokens=update.num_tokens, length=LENGTH
    )
    for batch in micro_batches([update.batch]):
        old_T = torch.from_numpy(np.where(batch.mask, batch.rollout_logprobs, np.nan).astype(np.float64))
        new_T = (old_T + torch.from_numpy(moved(batch.targets))).requires_grad_()
        added = {"old_logprobs": old_T}
        if algorithm.kl_coef:
            added["reference_logprobs"] = new_T.detach() - torch.from_numpy(distance(batch.targets))
        if "advantages" in batch.added:
            added["advantages"] = torch.from_numpy(batch.added["advantages"]).double()
        tokens = LossBatch(
            mask_T=torch.from_numpy(batch.mask), trajectory_ids_T=torch.from_numpy(batch.trajectory_ids).long(),
            rollout_logprobs_T=old_T, added_T=added, num_sampled_N=torch.from_numpy(batch.num_sampled),
            advantages_N=torch.from_numpy(batch.advantages).double(), remote_N={}, sum_over_ranks=None,
        )  # fmt: skip
        sums = policy_objective(new_T, 0.1 * new_T, tokens, settings=algorithm, entropy_coef=entropy_coef)
        (sums.loss / by).backward()
        found |= dict(zip(batch.targets[batch.mask].tolist(), new_T.grad.numpy()[batch.mask].tolist(), strict=True))
    return found


def sampled(trajectory: Trajectory) -> list[int]:
    return [int(t) for s in trajectory.segments for t, m in zip(s.tokens, s.loss_mask, strict=True) if m]


def dealt(batch: list[Trajectory], num_updates: int) -> list[list[Trajectory]]:
    """The trajectories of each update: groups of differing rewards are dealt in turn, then those of equal ones."""
    groups = {}
    for trajectory in batch:
        groups.setdefault(trajectory.group_id, []).append(trajectory)
    mixed = [own for own in groups.values() if len({t.reward for t in own}) > 1]
    equal = [own for own in groups.values() if len({t.reward for t in own}) == 1]
    return [[t for own in (mixed + equal)[number::num_updates] for t in own] for number in range(num_updates)]


def closed_form(own: list[Trajectory], algorithm: AlgorithmConfig, entropy_coef: float = 0.0) -> dict[int, float]:
    """The gradient of each token of an update."""
    groups, found = {}, {}
    for trajectory in own:
        groups.setdefault(trajectory.group_id, []).append(trajectory.reward)
    all_tokens = sum(len(sampled(t)) for t in own)
    for trajectory in own:
        rewards, tokens = np.array(groups[trajectory.group_id]), sampled(trajectory)
        advantage = trajectory.reward - rewards.mean()
        if algorithm.advantage == "grpo":
            advantage /= rewards.std(ddof=1) + 1e-6
        if algorithm.advantage == "rloo":
            advantage *= len(rewards) / (len(rewards) - 1)
        weight = {
            Aggregation.trajectory: 1 / len(own) / len(tokens),
            Aggregation.token: 1 / all_tokens,
            Aggregation.constant: 1 / len(own) / LENGTH,
        }[algorithm.aggregation]
        for token in tokens:
            of_kl = algorithm.kl_coef * (1 - np.exp(-distance(token)))
            found[token] = weight * (of_kl - advantage * np.exp(moved(token)) - 0.1 * entropy_coef)
    return found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("updates", [1, 3])
@pytest.mark.parametrize("aggregation", [*Aggregation])
@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo"])
def test_gradients_are_those_of_the_means_over_all_trajectories_with_and_without_leaving_out(
    advantage, aggregation, updates, seed
):
    """Nine of twelve groups are solved."""
    batch, found = batch_of(seed, num_solved=9, num_mixed=3), []
    for skips in (False, True):
        settings = recipe(updates, advantage=advantage, aggregation=aggregation, skip_zero_variance=skips)
        made = updates_of(batch, settings)
        assert len(made) == updates
        found.append([gradients(update, settings) for update in made])
        for got, own in zip(found[-1], dealt(batch, updates), strict=True):
            expected = closed_form(own, settings.algorithm)
            assert got == pytest.approx({token: expected[token] for token in got}, rel=1e-6, abs=1e-9)
            assert all(value == 0 for token, value in expected.items() if token not in got)
    for whole, part in zip(*found, strict=True):
        assert len(part) < len(whole) / 2
        assert part == {token: whole[token] for token in part}


@pytest.mark.parametrize("aggregation", [*Aggregation])
def test_groups_of_equal_rewards_keep_their_kl_and_their_entropy_bonus(aggregation):
    batch = batch_of(7, num_solved=5, num_mixed=3)
    for terms in ({"kl_coef": 0.2}, {"entropy_coef": 0.05}, {"kl_coef": 0.2, "entropy_coef": 0.05}):
        settings = recipe(2, advantage="dr_grpo", aggregation=aggregation, **terms)
        for update, own in zip(updates_of(batch, settings), dealt(batch, 2), strict=True):
            entropy_coef = terms.get("entropy_coef", 0.0)
            expected = closed_form(own, settings.algorithm, entropy_coef)
            assert gradients(update, settings, entropy_coef) == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_an_update_has_its_share_of_all_groups_and_one_of_zero_variance_is_left_out():
    """Six of eight groups have zero variance, for four updates of two groups each."""
    batch = batch_of(1, num_solved=6, num_mixed=2)
    made = updates_of(batch, recipe(4))
    assert [update.num_trajectories for update in made] == [2 * SAMPLES] * 2
    assert [update.num_tokens for update in made] == [
        sum(len(sampled(t)) for t in own) for own in dealt(batch, 4)[:2]
    ]  # fmt: skip
    assert [len(held_trajectories(update)) for update in made] == [SAMPLES] * 2
    assert [len(held_trajectories(update)) for update in updates_of(batch, recipe(4, skip_zero_variance=False))] == [
        2 * SAMPLES
    ] * 4
    assert updates_of(batch_of(1, num_solved=6, num_mixed=0), recipe(4)) == []


def test_what_the_selection_leaves_out_is_no_part_of_an_update():
    """The best and the worst of each group, also of those of equal rewards."""
    batch = batch_of(2, num_solved=2, num_mixed=1)
    (update,) = updates_of(batch, recipe(selection=SelectionConfig(mode=SelectionMode.best_and_worst)))
    assert (update.num_trajectories, len(held_trajectories(update))) == (6, 2)
    (update,) = updates_of(batch, recipe(selection=SelectionConfig(mode=SelectionMode.best)))
    assert (update.num_trajectories, len(held_trajectories(update))) == (3, 3)


def held_trajectories(update: Update) -> set[int]:
    return {index for batch in micro_batches([update.batch]) for index in batch.trajectories.tolist()}


@pytest.mark.parametrize("num_solved", [0, 4, 9])
def test_whitening_is_over_all_tokens_of_the_rollout(monkeypatch, num_solved):
    """REINFORCE++ with a baseline: mean and deviation have the zeros of solved groups in them."""
    monkeypatch.setattr(exchange, "over_data", lambda value, group: [value])
    monkeypatch.setattr(rank_batches, "sum_over_data", lambda values, group: [float(value) for value in values])
    batch = batch_of(3, num_solved=num_solved, num_mixed=3)
    settings = recipe(2, **SETTINGS[AlgorithmName.reinforce_pp_baseline])
    made = updates_of(batch, settings)
    held = RankBatches(SimpleNamespace(layout=SimpleNamespace(is_last_stage=True), data_group=None))
    held.put_batches([micro_batches([update.batch]) for update in made])
    held.add_advantages(settings.algorithm)
    means = {t.group_id: np.mean([o.reward for o in batch if o.group_id == t.group_id]) for t in batch}
    plain = {token: t.reward - means[t.group_id] for t in batch for token in sampled(t)}
    values = np.array(list(plain.values()))
    expected = {token: (value - values.mean()) / values.std() for token, value in plain.items()}
    found = {
        int(token): float(value)
        for of_update in held.updates for one in of_update
        for token, value in zip(one.targets[one.mask], one.added["advantages"][one.mask], strict=True)
    }  # fmt: skip
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("change", "skips"),
    [
        ({}, True),
        ({"algorithm.skip_zero_variance": False}, False),
        ({"algorithm.kl_coef": 0.1}, False),
        ({"algorithm.kl_coef": 0.1, "algorithm.kl_place": KlPlace.reward}, False),
        ({"algorithm.entropy_coef": 0.01}, False),
        # Its weight may be 0 now and not later, and what it follows is the entropy of all tokens.
        ({"algorithm.entropy_target": 0.5}, False),
        ({"algorithm.whiten": True}, False),
        ({"algorithm.teacher_coef": 0.5}, False),
        ({"algorithm.advantage": "gae"}, False),
        ({"algorithm.loss": "my_module:my_loss"}, False),
        ({"algorithm.advantage": "my_module:my_advantage"}, True),
        ({"algorithm.credit": CreditConfig(name=CreditName.turn)}, True),
        ({"trainer.mtp.train": True}, False),
        ({"trainer.megatron": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01}}, False),
        ({"trainer.megatron": {"moe_aux_loss_coeff": [0.01, 0.0]}}, False),
        ({"trainer.megatron": {"moe_z_loss_coeff": 1e-3}}, False),
        ({"trainer.megatron": {"moe_router_bias_update_rate": 1e-3}}, False),
        ({"trainer.megatron": {"moe_router_load_balancing_type": "none", "moe_z_loss_coeff": None}}, True),
    ],
)
def test_passes_leave_out_only_what_adds_nothing_to_a_gradient(change, skips):
    made = recipe()
    for key, value in change.items():
        *path, name = key.split(".")
        part = made
        for step in path:
            part = getattr(part, step)
        setattr(part, name, value)
    assert skips_zero_variance(made) == skips
