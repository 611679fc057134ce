"""A critic under every layout: values, advantages, returns and updates equal those of one rank.

Four trajectories of three segments each, which several ranks split over micro-batches and data-parallel ranks. The
log-probs of the policy and the reference come from a batch that was packed for another layout.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from ranks import run_ranks
from trainer_cases import in_layouts, sequences

from slimrl.algorithms.values import estimate_advantages, value_objective
from slimrl.config.schema.algorithm import AlgorithmConfig, KlPlace
from slimrl.config.schema.trainer import CriticConfig, OptimizerConfig
from slimrl.data.packing import ADVANTAGES, OLD_LOGPROBS, REFERENCE_LOGPROBS, RETURNS, VALUES, micro_batches, pack
from slimrl.data.pieces import pieces_of
from slimrl.runtime.cluster.exchange import over_data
from slimrl.runtime.cluster.rank_batches import RankBatches
from slimrl.trainer.build import unwrap

pytestmark = [pytest.mark.integration, pytest.mark.timeout(280)]

TP2_SP = {"tensor": 2, "sequence": True}
TWO_RANKS = [{}, {**TP2_SP, "expert_tensor": 2}, {"context": 2}]
"""The first is two data-parallel ranks."""
TWO_RANKS_MORE = [{"pipeline": 2}, {"pipeline": 2, "virtual_pipeline": 2}, {"expert": 2}, TP2_SP]
FOUR_RANKS = [{**TP2_SP, "pipeline": 2, "expert": 2}, {"context": 2, "pipeline": 2}]
KL = AlgorithmConfig(advantage="gae", kl_coef=0.3, kl_place=KlPlace.reward)
CRITIC = CriticConfig(discount=0.97, gae_lambda=0.9)
NAMES = (VALUES, ADVANTAGES, RETURNS)


@pytest.fixture(scope="module")
def expected(weights):
    return run_ranks(critics, 1, weights, [{"max_tokens_per_rank": 1024}], timeout_s=200)[0][0]


def critics(rank, num_ranks, port, weights, layouts):
    """For each layout: values, advantages and returns by sequence, and the results of two updates."""
    results = []
    optimizer = OptimizerConfig(lr=1e-4)
    made = [{**layout, "optimizer": optimizer} for layout in layouts]
    for run in in_layouts(rank, num_ranks, port, made, weights, critic=True):
        parts = packed(run.trainer.max_tokens_per_rank * run.layout.context, run.layout)
        for chunk in map(unwrap, run.chunks):
            if chunk.post_process:
                generator = torch.Generator().manual_seed(0)
                weight = chunk.output_layer.weight
                weight.data.copy_(0.1 * torch.randn(weight.shape, generator=generator))
        run.optimizer.megatron.reload_model_params()
        held = RankBatches(run.runner)
        held.put_batches([parts[run.layout.data_rank]])
        held.add_values(0)
        held.place(0, pieces_elsewhere())
        held.estimate(0, KL, CRITIC)
        found = {piece.sequence: piece.values for piece in held.pieces(0, NAMES)}
        if run.layout.is_last_stage:
            found = {
                sequence: values
                for of_rank in over_data(found, run.runner.data_group)
                for sequence, values in of_rank.items()
            }
        updates = []
        for _ in range(2):
            held.accumulate(0, loss, sum(int(m.mask.sum()) for m in micro_batches([parts])), 1.0)
            updates.append(held.step())
        results.append((found, updates))
    return results


def loss(values_T, zeros_T, batch):
    return value_objective(values_T, zeros_T, batch, value_clip=0.01)


def packed(budget_tokens, layout=None):
    segments, rewards_N = sequences(0)
    return pack(
        [segments[index::4] for index in range(4)], rewards_N[:4], budget_tokens=budget_tokens,
        alignment=1 if layout is None else layout.alignment,
        data_parallel=1 if layout is None else layout.data,
        micro_batch_multiple=1 if layout is None else layout.micro_batch_multiple,
    )  # fmt: skip


def pieces_elsewhere():
    """Log-probs of every sampled token, random but equal on all ranks."""
    pieces = []
    for batch in packed(70)[0]:
        own = pieces_of(batch, {OLD_LOGPROBS: batch.rollout_logprobs})
        for piece in own:
            noise = np.random.default_rng(piece.sequence).normal(size=len(piece.values[OLD_LOGPROBS]))
            reference = piece.values[OLD_LOGPROBS] + 0.3 * noise
            pieces.append(replace(piece, values={**piece.values, REFERENCE_LOGPROBS: reference}))
    return pieces


def assert_equal_to_one_rank(weights, expected, num_ranks, layouts):
    of_ranks = run_ranks(critics, num_ranks, weights, layouts, timeout_s=250)
    for number, layout in enumerate(layouts):
        wanted, wanted_updates = expected
        found = next(of_rank[number][0] for of_rank in of_ranks if of_rank[number][0])
        assert found.keys() == wanted.keys(), layout
        for sequence, values in found.items():
            for name in NAMES:
                where = f"{layout} {name} {sequence}"
                np.testing.assert_allclose(values[name], wanted[sequence][name], atol=2e-5, err_msg=where)
        for of_rank in of_ranks:
            for update, other in zip(of_rank[number][1], wanted_updates, strict=True):
                assert update.grad_norm == pytest.approx(other.grad_norm, rel=2e-5), layout
                for term, value in other.sums.items():
                    assert update.sums[term] == pytest.approx(value, rel=2e-5, abs=1e-3), f"{layout} {term}"


def test_on_one_rank_advantages_are_those_of_each_trajectory_and_values_learn(expected):
    found, (first, second) = expected
    segments, rewards_N = sequences(0)
    elsewhere = {piece.sequence: piece.values for piece in pieces_elsewhere()}
    for trajectory in range(4):
        # Segments are packed trajectory by trajectory.
        own = [3 * trajectory + index for index in range(3)]
        values, old, reference = (
            np.concatenate([of[sequence][name] for sequence in own]).astype(np.float64)
            for of, name in ((found, VALUES), (elsewhere, OLD_LOGPROBS), (elsewhere, REFERENCE_LOGPROBS))
        )
        rewards = -0.3 * (old - reference)
        rewards[-1] += rewards_N[trajectory]
        advantages, returns = estimate_advantages(rewards, values, discount=0.97, gae_lambda=0.9)
        np.testing.assert_allclose(np.concatenate([found[s][ADVANTAGES] for s in own]), advantages, atol=1e-5)
        np.testing.assert_allclose(np.concatenate([found[s][RETURNS] for s in own]), returns, atol=1e-5)
    assert len(segments) == 12
    assert second.sums["loss"] < first.sums["loss"]
    assert second.sums["clipped"] > 0


def test_two_ranks_make_the_updates_of_one(weights, expected):
    assert_equal_to_one_rank(weights, expected, 2, TWO_RANKS)


@pytest.mark.full
def test_two_ranks_of_other_layouts_make_the_updates_of_one(weights, expected):
    assert_equal_to_one_rank(weights, expected, 2, TWO_RANKS_MORE)


@pytest.mark.full
def test_four_ranks_make_the_updates_of_one(weights, expected):
    assert_equal_to_one_rank(weights, expected, 4, FOUR_RANKS)
