"""Opponents by script: they play roles in the environment, which the policy is not asked for."""

import random
from functools import cache
from typing import Any, Protocol

import pyspiel

CFR_UPDATES = 1000
"""Updates of counterfactual regret minimisation; Kuhn poker's exploitability is 0.001 then"""
MAX_POSITIONS = 20_000
"""Largest game that is solved"""


class Opponent(Protocol):
    def __call__(self, state: pyspiel.State, chance: random.Random) -> int:
        """The number of a move of the player whose turn it is."""
        ...


def opponent(name: str, game: pyspiel.Game) -> Opponent:
    """
    Args:
        name: `random`; `first`: always the first move of the list; `optimal`: one of the best moves, of a small game;
            `mcts:N`: OpenSpiel's Monte-Carlo tree search with N simulations, where all is open.

    Raises:
        ValueError: there is no such opponent, or the game is none for it.
    """
    kind, _, number = name.partition(":")
    if kind == "random" and not number:
        return lambda state, chance: chance.choice(state.legal_actions())
    if kind == "first" and not number:
        return lambda state, chance: int(state.legal_actions()[0])
    if kind == "optimal" and not number:
        return _equilibrium(game) if _is_hidden(game) else _best(game)
    if kind == "mcts" and number.isdigit() and int(number):
        if _is_hidden(game):
            raise ValueError(f"opponent {name}: {game} hides something from its players")
        return _searching(game, int(number))
    raise ValueError(f"opponent {name}: it is random, first, optimal or mcts:N")


def best_moves(state: pyspiel.State) -> list[int]:
    """All moves from which the player whose turn it is gets the most, if both play on as well as they can.

    Raises:
        ValueError: the game is too large, has chance in it, or more than two players.
    """
    player, values = state.current_player(), _values(str(state.get_game()))
    found = {action: values(state.child(action)) for action in state.legal_actions()}
    sign = 1 if player == 0 else -1
    most = max(sign * value for value in found.values())
    return [action for action, value in found.items() if sign * value == most]


def _is_hidden(game: pyspiel.Game) -> bool:
    return game.get_type().information != pyspiel.GameType.Information.PERFECT_INFORMATION


def _best(game: pyspiel.Game) -> Opponent:
    best_moves(game.new_initial_state())
    return lambda state, chance: chance.choice(best_moves(state))


@cache
def _values(name: str) -> Any:
    """A function of a state: what player 0 gets of it, by minimax; positions that were seen are kept."""
    game = pyspiel.load_game_as_turn_based(name)
    kind, known = game.get_type(), dict[str, float]()
    deterministic = kind.chance_mode == pyspiel.GameType.ChanceMode.DETERMINISTIC
    if game.num_players() != 2 or kind.utility != pyspiel.GameType.Utility.ZERO_SUM or not deterministic:
        raise ValueError(f"{name} is no game of two players without chance")

    def value(state: pyspiel.State) -> float:
        if state.is_terminal():
            return float(state.returns()[0])
        key = f"{state.current_player()} {state}"
        if key not in known:
            if len(known) >= MAX_POSITIONS:
                raise ValueError(f"{name} has more than {MAX_POSITIONS} positions, so it is not solved here")
            children = [value(state.child(action)) for action in state.legal_actions()]
            known[key] = (max if state.current_player() == 0 else min)(children)
        return known[key]

    return value


@cache
def _average_policy(name: str) -> pyspiel.Policy:
    solver = pyspiel.CFRSolver(pyspiel.load_game_as_turn_based(name))
    for _ in range(CFR_UPDATES):
        solver.evaluate_and_update_policy()
    return solver.tabular_average_policy()


def _equilibrium(game: pyspiel.Game) -> Opponent:
    if game.max_game_length() > 4 or game.num_distinct_actions() > 4:
        raise ValueError(f"opponent optimal: {game} is too large to be solved here; Kuhn poker is not")
    policy = _average_policy(str(game))

    def play(state: pyspiel.State, chance: random.Random) -> int:
        actions, weights = zip(*policy.action_probabilities(state).items(), strict=True)
        return int(chance.choices(actions, weights)[0])

    return play


def _searching(game: pyspiel.Game, simulations: int) -> Opponent:
    def play(state: pyspiel.State, chance: random.Random) -> int:
        seed = chance.randrange(2**31)
        evaluator = pyspiel.RandomRolloutEvaluator(1, seed)
        return int(pyspiel.MCTSBot(game, evaluator, 2.0, simulations, 64, True, seed, False).step(state))

    return play
