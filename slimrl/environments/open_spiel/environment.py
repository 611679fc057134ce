"""A game of OpenSpiel in which each player is a role: the policy against itself, or against an opponent by script.

The prompt's metadata has `game` and may have `opponents`, an object of names by role, and `seed`, with which the cards
and dice of all its trajectories are alike. The other roles are asked in the order of the game. The last line of a turn
is the move, one of those that the message lists.
"""

import copy
import random
from typing import Any, Self

from slimrl.agent.environment import Message, Observation, Turn
from slimrl.data.prompt import Prompt
from slimrl.environments.open_spiel.games import chosen, introduced, load, role_of, said, seen
from slimrl.environments.open_spiel.opponents import Opponent, best_moves, opponent


class OpenSpiel:
    """
    Args:
        illegal_moves: in a row that a role may make before it loses; each is answered with an error.
        measure_optimal: report the share of the policy's moves that are among the best, of small games where all is
            open.
    """

    ROLES = ("player_0", "player_1")
    """The roles that a recipe can name"""

    def __init__(self, illegal_moves: int = 0, measure_optimal: bool = False) -> None:
        self._patience, self._measures = illegal_moves, measure_optimal
        self._metrics: dict[str, float] = {"moves": 0.0, "illegal": 0.0}
        self._asked: set[str] = set()
        """Roles whose conversation has begun"""
        self._num_illegal = self._num_best = self._num_own = 0

    @classmethod
    def check(cls, illegal_moves: int = 0, measure_optimal: bool = False) -> None:
        """Raises ValueError for arguments of another kind."""
        if not isinstance(illegal_moves, int) or illegal_moves < 0:
            raise ValueError(f"illegal_moves: {illegal_moves!r} is no whole number from 0")
        if not isinstance(measure_optimal, bool):
            raise ValueError(f"measure_optimal: {measure_optimal!r} is not a bool")

    def start(self, prompt: Prompt, *, seed: int, scratch: dict[str, Any]) -> Observation:
        """Raises ValueError: there is no such game or opponent."""
        name = prompt.metadata.get("game")
        if not isinstance(name, str):
            raise ValueError(f"{prompt.prompt_id}: metadata.game must be the name of a game, such as tic_tac_toe")
        self._prompt, self._name = prompt, name
        self._game, self._chance = load(self._name), random.Random(seed)
        self._deals = random.Random(f"deals {prompt.metadata.get('seed', seed)}")
        self._roles = [role_of(player) for player in range(self._game.num_players())]
        named: dict[str, str] = prompt.metadata.get("opponents", {})
        if unknown := sorted(set(named) - set(self._roles)):
            raise ValueError(
                f"{prompt.prompt_id}: opponents of {', '.join(unknown)}; roles are {', '.join(self._roles)}"
            )
        if len(named) == len(self._roles):
            raise ValueError(f"{prompt.prompt_id}: all roles have opponents, so none is left for the policy")
        self._opponents: dict[str, Opponent] = {role: opponent(one, self._game) for role, one in named.items()}
        self._state = self._game.new_initial_state()
        if self._measures:
            best_moves(self._state)  # refuses a game that is too large
        self._go_on()
        return self._asks()

    def step(self, turn: Turn) -> Observation:
        action = None if turn.calls else chosen(turn.text, self._state)
        self._metrics["moves"] += 1
        if action is None:
            return self._illegal(turn)
        self._num_illegal = 0
        if self._measures:
            self._num_own += 1
            self._num_best += action in best_moves(self._state)
            self._metrics["optimal_fraction"] = self._num_best / self._num_own
        self._state.apply_action(action)
        self._go_on()
        if self._state.is_terminal():
            return self._over(self._payoffs())
        return self._asks(truncated=turn.is_last)

    def copy(self, *, scratch: dict[str, Any]) -> Self:
        other = copy.copy(self)
        other._state = self._state.clone()
        other._chance, other._deals = copy.deepcopy(self._chance), copy.deepcopy(self._deals)
        other._metrics, other._asked = dict(self._metrics), set(self._asked)
        return other

    def close(self) -> None:
        """Nothing is held but objects of this process."""

    def _go_on(self) -> None:
        """Let chance and opponents move until the policy is asked or the game is over."""
        while not self._state.is_terminal():
            if self._state.is_chance_node():
                actions, weights = zip(*self._state.chance_outcomes(), strict=True)
                self._state.apply_action(self._deals.choices(actions, weights)[0])
                continue
            role = role_of(self._state.current_player())
            if role not in self._opponents:
                return
            self._state.apply_action(self._opponents[role](self._state, self._chance))

    def _asks(self, *, problem: str = "", truncated: bool = False) -> Observation:
        """The message to the role whose turn it is."""
        player = self._state.current_player()
        role, state = role_of(player), f"{player} {seen(self._state, player)}"
        if role in self._asked:
            messages: list[Message] = [{"role": "user", "content": problem + said(self._state)}]
        else:
            self._asked.add(role)
            *others, last = self._prompt.messages
            text = f"{last['content']}\n{introduced(self._name, self._state)}"
            messages = [*others, {**last, "content": text}]
        return Observation(
            messages=messages, role=role, state_id=state, truncated=truncated, metrics=dict(self._metrics)
        )

    def _illegal(self, turn: Turn) -> Observation:
        self._num_illegal += 1
        self._metrics["illegal"] += 1
        if self._num_illegal <= self._patience:
            return self._asks(problem="That is none of the moves.\n", truncated=turn.is_last)
        loser = role_of(self._state.current_player())
        # The others did not win, so they are paid nothing.
        return self._over({role: -1.0 if role == loser else 0.0 for role in self._roles})

    def _payoffs(self) -> dict[str, float]:
        """What each role gets, as a share of the most that can be won or lost in this game."""
        most = max(abs(self._game.min_utility()), abs(self._game.max_utility()))
        return dict(zip(self._roles, (value / most for value in self._state.returns()), strict=True))

    def _over(self, payoffs: dict[str, float]) -> Observation:
        own = [role for role in self._roles if role not in self._opponents]
        for role in own:
            self._metrics[f"{role}_won"] = float(payoffs[role] > 0)
        self._metrics["draw"] = float(not any(payoffs.values()))
        return Observation(
            done=True,
            role=own[0],
            reward=payoffs[own[0]] if len(own) == 1 else None,
            role_rewards={role: payoffs[role] for role in own},
            state_id="over",
            metrics=dict(self._metrics),
        )
