"""Advantages by token against a formula written one trajectory at a time, however the tokens were packed."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from slimrl.config.schema.algorithm import AlgorithmConfig, KlEstimator, KlPlace
from slimrl.data.packing import ADVANTAGES, OLD_LOGPROBS, REFERENCE_LOGPROBS, pack
from slimrl.data.pieces import cut, join, pieces_of
from slimrl.data.trajectory import Segment
from slimrl.runtime.cluster import exchange, rank_batches
from slimrl.runtime.cluster.rank_batches import RankBatches

COEFFICIENT = 0.3
KL = AlgorithmConfig(
    kl_coef=COEFFICIENT, kl_place=KlPlace.reward, kl_estimator=KlEstimator.k1, max_logprob_mismatch=1.0
)


def trajectories(seed: int, count: int = 5) -> list[list[Segment]]:
    """Trajectories of 1 to 3 segments; the last one's first segment was not sampled. Token ids number the tokens."""
    rng, found, number = np.random.default_rng(seed), [], 0
    for index in range(count):
        segments = []
        for _ in range(1 + index % 3):
            length = int(rng.integers(4, 20))
            mask = rng.random(length) < 0.6
            mask[0] = False
            mask[-1] = True
            segments.append(Segment.not_sampled(np.arange(number, number + length), mask))
            number += length
        found.append(segments)
    found[-1][0].loss_mask[:] = False
    return found


def old(token) -> np.ndarray:
    return -1.0 - np.sin(np.asarray(token, np.float64))


def reference(token) -> np.ndarray:
    return -1.0 - np.cos(3.0 * np.asarray(token, np.float64))


def formula(segments_N, advantages_N, settings: AlgorithmConfig) -> dict[int, float]:
    """Advantage of each sampled token, by its id."""
    found = {}
    for segments, advantage in zip(segments_N, advantages_N, strict=True):
        sampled = [int(t) for s in segments for t, m in zip(s.tokens[1:], s.loss_mask[1:], strict=True) if m]
        for place, token in enumerate(sampled):
            charged = sum(old(later) - reference(later) for later in sampled[place:])
            found[token] = advantage - (settings.kl_coef * charged if settings.kl_place is KlPlace.reward else 0)
    if settings.whiten:
        values = np.array(list(found.values()))
        found = {token: (value - values.mean()) / values.std() for token, value in found.items()}
    return found


def held(segments_N, advantages_N, budget: int, ranks: int) -> list[RankBatches]:
    """Each data-parallel rank's batches of one update, with the log-probs that a pass would add."""
    parts = pack(segments_N, advantages_N, budget_tokens=budget, alignment=2, data_parallel=ranks)
    made = []
    for batches in parts:
        for batch in batches:
            for name, of in ((OLD_LOGPROBS, old), (REFERENCE_LOGPROBS, reference)):
                batch.added[name] = np.where(batch.mask, of(batch.targets), np.nan).astype(np.float32)
        one = RankBatches(SimpleNamespace(layout=SimpleNamespace(is_last_stage=True), data_group=None))
        one.put_batches([batches])
        made.append(one)
    return made


@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("budget", [20, 256])
def test_one_rank_gives_each_token_what_the_formula_says(monkeypatch, whiten, budget):
    monkeypatch.setattr(exchange, "over_data", lambda value, group: [value])
    monkeypatch.setattr(rank_batches, "sum_over_data", lambda values, group: [float(value) for value in values])
    segments_N, advantages_N = trajectories(0), np.float32([1.0, -0.5, 0.25, 2.0, -1.0])
    settings = replace(KL, whiten=whiten)
    (rank,) = held(segments_N, advantages_N, budget, 1)
    rank.add_advantages(settings)
    found = {}
    for batch in rank.updates[0]:
        assert batch.added[ADVANTAGES].dtype == np.float32
        assert not batch.added[ADVANTAGES][~batch.mask].any()
        found |= dict(
            zip(batch.targets[batch.mask].tolist(), batch.added[ADVANTAGES][batch.mask].tolist(), strict=True)
        )
    assert found == pytest.approx(formula(segments_N, advantages_N, settings), rel=1e-5, abs=1e-5)


def test_a_trajectory_on_two_ranks_is_charged_as_a_whole(monkeypatch):
    """Each rank is run with what the others would send it."""
    segments_N, advantages_N = trajectories(1), np.zeros(5, np.float32)
    ranks, found = held(segments_N, advantages_N, 20, 3), {}
    sent: dict[int, list] = {}
    for first in (True, False):
        for number, rank in enumerate(ranks):
            rank.updates[0][0].added.pop(ADVANTAGES, None)
            for batch in rank.updates[0]:
                batch.added.pop(ADVANTAGES, None)

            def over_data(value, group, number=number):
                sent[number] = value
                return [sent.get(other, []) for other in range(3)]

            monkeypatch.setattr(exchange, "over_data", over_data)
            if first:
                # What it would send is known before the others answer.
                try:
                    rank.add_advantages(KL)
                except KeyError:
                    continue
            else:
                rank.add_advantages(KL)
    for batch in (batch for rank in ranks for batch in rank.updates[0]):
        found |= dict(
            zip(batch.targets[batch.mask].tolist(), batch.added[ADVANTAGES][batch.mask].tolist(), strict=True)
        )
    assert any(sent.values())
    assert found == pytest.approx(formula(segments_N, advantages_N, KL), rel=1e-5, abs=1e-5)


def test_a_rank_that_sees_no_log_probs_adds_nothing():
    one = RankBatches(SimpleNamespace(layout=SimpleNamespace(is_last_stage=False), data_group=None))
    one.put_batches([[SimpleNamespace()]])
    one.add_advantages(KL)


def test_pieces_are_joined_in_the_order_of_the_tokens_and_cut_again():
    segments_N = trajectories(2, 4)
    parts = pack(segments_N, np.zeros(4, np.float32), budget_tokens=20, alignment=2, data_parallel=2)
    pieces = [p for part in parts for b in part for p in pieces_of(b, {"ids": b.targets}) if p.trajectory == 2]
    assert len(pieces) == 3
    expected = [s.tokens[1:][s.loss_mask[1:]] for s in segments_N[2]]
    joined = join(pieces[::-1])["ids"]
    np.testing.assert_array_equal(joined, np.concatenate(expected))
    again = cut(joined, pieces[::-1])
    for place, sequence in enumerate(sorted(again)):
        np.testing.assert_array_equal(again[sequence], expected[place])
