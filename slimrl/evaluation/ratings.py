"""Ratings of players by games between them: the Bradley-Terry model by maximum likelihood, as Elo.

A player with rating a wins against one with rating b with the probability 1 / (1 + 10^((b - a) / 400)); a draw is half
a win of each. One player's rating is 0. Whoever won, or lost, all games has no finite rating: ratings end at BOUND.

Letters: P players, D sets of games (the games themselves, or resamples).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 1000
CONFIDENCE = 0.95
BOUND = 2400.0
"""Largest rating, in Elo; a player that much better wins 999,999 of 1,000,000 games"""
ELO = 400.0 / math.log(10.0)
"""Elo points of a factor e in the odds"""
_SWEEPS = 20_000
_CLOSE = 1e-9


@dataclass(kw_only=True)
class PairResult:
    """Games of two players."""

    wins: int = 0
    """Games that the first won"""
    draws: int = 0
    losses: int = 0

    @property
    def games(self) -> int:
        return self.wins + self.draws + self.losses

    def count(self, outcome: float) -> None:
        """Add a game: 1 if the first won, 0.5 for a draw, 0 if it lost."""
        self.wins += outcome == 1
        self.draws += outcome == 0.5
        self.losses += outcome == 0


@dataclass(frozen=True, kw_only=True)
class Rating:
    name: str
    elo: float
    low: float
    """Ends of the 95% interval; both 0 for the anchor"""
    high: float


def ratings(names: Sequence[str], pairs: Mapping[tuple[str, str], PairResult], anchor: str, seed: int) -> list[Rating]:
    """Ratings in the order of the names, with percentile intervals of a bootstrap over the games of each pair.

    Args:
        pairs: results by players, each pair once.
        anchor: whose rating is 0.

    Raises:
        ValueError: games do not join all players, so that some cannot be compared.
    """
    _refuse_apart(names, pairs)
    place = {name: index for index, name in enumerate(names)}
    rng = np.random.default_rng(seed)
    points_DPP = np.zeros((1 + RESAMPLES, len(names), len(names)))
    for (a, b), result in pairs.items():
        if not result.games:
            continue
        counts = np.array([result.wins, result.draws, result.losses])
        drawn_D3 = np.vstack([counts, rng.multinomial(result.games, counts / result.games, size=RESAMPLES)])
        points_DPP[:, place[a], place[b]] = drawn_D3 @ [1, 0.5, 0]
        points_DPP[:, place[b], place[a]] = drawn_D3 @ [0, 0.5, 1]
    elo_DP = maximum_likelihood(points_DPP, place[anchor])
    tail = (1 - CONFIDENCE) / 2
    low_P, high_P = np.quantile(elo_DP[1:], [tail, 1 - tail], axis=0)
    return [
        Rating(name=name, elo=float(elo_DP[0, index]), low=float(low_P[index]), high=float(high_P[index]))
        for name, index in place.items()
    ]


def maximum_likelihood(points_DPP: np.ndarray, anchor: int) -> np.ndarray:
    """Elo ratings, float64 [D, P], by coordinate ascent with a Newton step for each player in turn.

    The likelihood is concave in the ratings, so there is one maximum within BOUND.

    Args:
        points_DPP: points of each player against each other one.
        anchor: player whose rating is 0.
    """
    num_sets, num_players, _ = points_DPP.shape
    theta_DP = np.zeros((num_sets, num_players))
    left = np.arange(num_sets)
    for _ in range(_SWEEPS):
        before_DP = theta_DP[left]
        theta_DP[left] = _swept(before_DP.copy(), points_DPP[left], anchor)
        left = left[np.abs(theta_DP[left] - before_DP).max(axis=1) >= _CLOSE]
        if not len(left):
            break
    return theta_DP * ELO


def _swept(theta_DP: np.ndarray, points_DPP: np.ndarray, anchor: int) -> np.ndarray:
    """The log-odds after a step of each player, in the same array."""
    games_DPP = points_DPP + points_DPP.transpose(0, 2, 1)
    for player in range(theta_DP.shape[1]):
        if player == anchor:
            continue
        wins_DP = 1 / (1 + np.exp(theta_DP - theta_DP[:, player, None]))
        slope_D = (points_DPP[:, player] - games_DPP[:, player] * wins_DP).sum(axis=1)
        curve_D = (games_DPP[:, player] * wins_DP * (1 - wins_DP)).sum(axis=1)
        # Within 1 of the maximum Newton's steps converge; from farther away they would overshoot.
        step_D = np.clip(slope_D / np.maximum(curve_D, 1e-12), -1, 1)
        theta_DP[:, player] = np.clip(theta_DP[:, player] + step_D, -BOUND / ELO, BOUND / ELO)
    return theta_DP


def _refuse_apart(names: Sequence[str], pairs: Mapping[tuple[str, str], PairResult]) -> None:
    joined = {names[0]}
    for _ in names:
        for (a, b), result in pairs.items():
            if result.games and joined & {a, b}:
                joined |= {a, b}
    if apart := [name for name in names if name not in joined]:
        raise ValueError(f"no game joins {', '.join(apart)} to {names[0]}, so their ratings cannot be compared")
