"""Opponents by script: they play roles in the environment, which the policy is not asked for."""

import random
from collections.abc import Iterable, Iterator
from functools import reduce
from operator import xor
from typing import Protocol

from slimrl.environments.textarena.games import Game
from slimrl.environments.textarena.moves import candidates

NOTHING = "[pass]"
"""Said by a player who has no move; TextArena judges it as a move that is none"""


class Opponent(Protocol):
    def __call__(self, game: Game, chance: random.Random) -> str:
        """What the player whose turn it is says, who has heard what there was to hear."""
        ...


def opponent(name: str, game: str) -> Opponent:
    """
    Args:
        name: `random`; `first`: always the first move; `optimal`: one of the best moves of Nim.
        game: TextArena's id.

    Raises:
        ValueError: there is no such opponent, or none for this game.
    """
    if name == "random":
        return random_move
    if name == "first":
        return lambda game, chance: next(legal_moves(game), NOTHING)
    if name == "optimal":
        refuse_unsolved(game)
        return lambda game, chance: chance.choice(best_moves(game))
    raise ValueError(f"opponent {name}: it is random, first or optimal")


def random_move(game: Game, chance: random.Random) -> str:
    texts = candidates(game.name, game.heard[game.player])
    return next(_taken(game, chance.sample(texts, len(texts))), NOTHING)


def legal_moves(game: Game) -> Iterator[str]:
    """Moves of the player whose turn it is, of those that moves.py knows: what TextArena takes, tried on copies."""
    return _taken(game, candidates(game.name, game.heard[game.player]))


def _taken(game: Game, texts: Iterable[str]) -> Iterator[str]:
    return (text for text in texts if game.copy().say(text))


def refuse_unsolved(game: str) -> None:
    """Raises ValueError: it is not known which moves of a game are the best."""
    if not game.startswith("Nim-"):
        raise ValueError(f"the best moves of {game} are not known here; those of Nim are")


def best_moves(game: Game) -> list[str]:
    """Moves of Nim that leave piles whose sizes xor to 0 (Bouton, 1901); all moves if there is none."""
    total = nim_sum(game)
    best = [
        f"[{index} {size - (size ^ total)}]" for index, size in enumerate(game.state["piles"]) if size ^ total < size
    ]
    return best or list(legal_moves(game))


def nim_sum(game: Game) -> int:
    """0 where the player whose turn it is loses to one who plays on as well as can be."""
    piles: list[int] = game.state["piles"]
    return reduce(xor, piles)
