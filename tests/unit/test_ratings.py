"""Ratings of players by games, against closed forms, another optimizer and ratings that are known."""

import math

import numpy as np
import pytest
import torch

from slimrl.evaluation.ratings import BOUND, PairResult, maximum_likelihood, ratings

ELO = 400 / math.log(10)


def test_two_players_have_the_rating_of_their_odds():
    pair = {("a", "b"): PairResult(wins=60, draws=20, losses=20)}
    a, b = ratings(["a", "b"], pair, "a", seed=0)
    # 0.3 of the points for b.
    assert (a.elo, a.low, a.high) == (0.0, 0.0, 0.0)
    assert b.elo == pytest.approx(400 * math.log10(0.3 / 0.7), abs=1e-4)
    assert b.low < b.elo < b.high
    [of_a, _] = ratings(["a", "b"], pair, "b", seed=0)
    assert of_a.elo == pytest.approx(-b.elo, abs=1e-4)


def test_the_interval_of_two_players_is_that_of_the_binomial_distribution():
    [_, b] = ratings(["a", "b"], {("a", "b"): PairResult(wins=300, losses=100)}, "a", seed=1)
    share, error = 0.25, math.sqrt(0.25 * 0.75 / 400)
    low, high = (400 * math.log10(p / (1 - p)) for p in (share - 1.96 * error, share + 1.96 * error))
    assert (b.low, b.high) == pytest.approx((low, high), abs=8)
    assert ratings(["a", "b"], {("a", "b"): PairResult(wins=300, losses=100)}, "a", seed=1)[1] == b


def by_gradients(points_PP: np.ndarray) -> np.ndarray:
    """Elo of all players but the first, by L-BFGS on the negative log-likelihood."""
    theta, points = torch.zeros(len(points_PP) - 1, dtype=torch.float64, requires_grad=True), torch.tensor(points_PP)
    optimizer = torch.optim.LBFGS([theta], max_iter=500, line_search_fn="strong_wolfe", tolerance_grad=1e-10)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        whole = torch.cat([torch.zeros(1, dtype=torch.float64), theta])
        total = -(points * torch.nn.functional.logsigmoid(whole[:, None] - whole[None, :])).sum()
        total.backward()
        return total

    optimizer.step(loss)
    return theta.detach().numpy() * ELO


def test_ratings_of_several_maximize_the_likelihood_of_all_games():
    rng = np.random.default_rng(0)
    points_PP = rng.integers(1, 20, size=(5, 5)).astype(float)
    np.fill_diagonal(points_PP, 0)
    points_PP[1, 3] = points_PP[3, 1] = 0  # who have not met
    found = maximum_likelihood(points_PP[None], 0)[0]
    assert found[0] == 0
    assert found[1:] == pytest.approx(by_gradients(points_PP), abs=0.001)


def test_simulated_games_give_back_the_ratings_of_the_players():
    known = {"a": 0.0, "b": 120.0, "c": -200.0, "d": 340.0}
    rng, pairs = np.random.default_rng(2), {}
    for i, a in enumerate(known):
        for b in list(known)[i + 1 :]:
            wins = int(rng.binomial(4000, 1 / (1 + 10 ** ((known[b] - known[a]) / 400))))
            pairs[a, b] = PairResult(wins=wins, losses=4000 - wins)
    for rating in ratings(list(known), pairs, "a", seed=3):
        assert rating.elo == pytest.approx(known[rating.name], abs=15)
        assert rating.low <= rating.elo <= rating.high
        assert rating.high - rating.low < 30


def test_who_wins_all_games_is_at_the_bound_and_the_others_are_as_without_it():
    pair = {("a", "b"): PairResult(wins=30, draws=0, losses=10)}
    all_lost = {("a", "c"): PairResult(losses=20), ("b", "c"): PairResult(losses=20)}
    a, b, c = ratings(["a", "b", "c"], pair | all_lost, "a", seed=0)
    assert (a.elo, c.elo, c.low, c.high) == (0, BOUND, BOUND, BOUND)
    assert b.elo == pytest.approx(400 * math.log10(0.25 / 0.75), abs=0.1)


def test_players_whom_no_game_joins_are_refused():
    with pytest.raises(ValueError, match="no game joins c, d to a"):
        ratings(["a", "b", "c", "d"], {("a", "b"): PairResult(wins=1), ("c", "d"): PairResult(wins=1)}, "a", 0)


def test_outcomes_are_counted():
    pair = PairResult()
    for outcome in (1.0, 0.5, 0.0, 1.0):
        pair.count(outcome)
    assert (pair.wins, pair.draws, pair.losses, pair.games) == (2, 1, 1, 4)
