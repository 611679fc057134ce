"""A game of TextArena in which each player is a role: the policy against itself, or against an opponent by script.

The prompt's metadata has `game`, TextArena's id, and may have `seed`, an integer with which the cards and dice of all
its trajectories are alike, and `opponents`, an object of names by role. What a role hears, which of its turns are moves
and what they earn is TextArena's: a turn is given to it as it is.
"""

import copy
import hashlib
import random
from typing import Any, Self

from slimrl.agent.environment import Message, Observation, Turn
from slimrl.data.prompt import Prompt
from slimrl.environments.textarena.games import NUM_PLAYERS, Game, refuse_unknown, role_of
from slimrl.environments.textarena.opponents import Opponent, nim_sum, opponent, refuse_unsolved


class TextArena:
    """
    Args:
        measure_optimal: report the share of the policy's turns that are among the best moves, of Nim.
    """

    ROLES = ("player_0", "player_1")
    """The roles that a recipe can name"""

    def __init__(self, measure_optimal: bool = False) -> None:
        self._measures = measure_optimal
        self._metrics: dict[str, float] = {"moves": 0.0, "illegal": 0.0, "crashed": 0.0}
        self._asked: set[str] = set()
        """Roles whose conversation has begun"""
        self._num_best = 0

    @classmethod
    def check(cls, measure_optimal: bool = False) -> None:
        """Raises ValueError for an argument of another kind."""
        if not isinstance(measure_optimal, bool):
            raise ValueError(f"measure_optimal: {measure_optimal!r} is not a bool")

    def start(self, prompt: Prompt, *, seed: int, scratch: dict[str, Any]) -> Observation:
        """Raises ValueError: there is no such game or opponent."""
        name, deals = prompt.metadata.get("game"), prompt.metadata.get("seed", seed)
        try:
            refuse_unknown(name)
            if self._measures:
                refuse_unsolved(str(name))
            if not isinstance(deals, int):
                raise ValueError(f"seed {deals!r} is no integer")
            named: dict[str, str] = prompt.metadata.get("opponents", {})
            if unknown := sorted(set(named) - set(self.ROLES)):
                raise ValueError(f"opponents of {', '.join(unknown)}; roles are {', '.join(self.ROLES)}")
            if len(named) == NUM_PLAYERS:
                raise ValueError("all roles have opponents, so none is left for the policy")
            self._opponents: dict[str, Opponent] = {role: opponent(one, str(name)) for role, one in named.items()}
        except ValueError as error:
            raise ValueError(f"{prompt.prompt_id}: metadata: {error}") from error
        self._prompt, self._chance = prompt, random.Random(seed)
        self.game = Game(str(name), deals)
        self._go_on()
        return self._asks()

    def step(self, turn: Turn) -> Observation:
        was_lost = self._measures and nim_sum(self.game) == 0
        is_move = self.game.say(turn.text)
        self._metrics["moves"] += 1
        self._metrics["illegal"] += not is_move
        if self._measures:
            self._num_best += is_move and (was_lost or nim_sum(self.game) == 0)
            self._metrics["optimal_fraction"] = self._num_best / self._metrics["moves"]
        self._go_on()
        return self._over() if self.game.is_over else self._asks(truncated=turn.is_last)

    def copy(self, *, scratch: dict[str, Any]) -> Self:
        other = copy.copy(self)
        other.game, other._chance = self.game.copy(), copy.deepcopy(self._chance)
        other._metrics, other._asked = dict(self._metrics), set(self._asked)
        return other

    def close(self) -> None:
        """Nothing is held but objects of this process."""

    def _go_on(self) -> None:
        """Let opponents move until the policy is asked or the game is over."""
        while not self.game.is_over:
            self._told = self.game.hear()
            role = role_of(self.game.player)
            if role not in self._opponents:
                return
            self.game.say(self._opponents[role](self.game, self._chance))

    def _asks(self, *, truncated: bool = False) -> Observation:
        """The message to the role whose turn it is."""
        role, told = role_of(self.game.player), self._told.strip("\n")
        messages: list[Message] = [{"role": "user", "content": told}]
        if role not in self._asked:
            self._asked.add(role)
            *others, last = self._prompt.messages
            messages = [*others, {**last, "content": f"{last['content']}\n{told}"}]
        heard = self.game.heard[self.game.player]
        state = f"{self.game.player} {hashlib.sha256(heard.encode(errors='surrogatepass')).hexdigest()[:16]}"
        return Observation(
            messages=messages, role=role, state_id=state, truncated=truncated, metrics=dict(self._metrics)
        )

    def _over(self) -> Observation:
        payoffs = {role_of(player): payoff for player, payoff in self.game.payoffs.items()}
        own = [role for role in self.ROLES if role not in self._opponents]
        for role in own:
            self._metrics[f"{role}_won"] = float(payoffs[role] > 0)
        self._metrics["draw"] = float(not any(payoffs.values()))
        self._metrics["crashed"] = float(bool(self.game.error))
        return Observation(
            done=True,
            role=own[0],
            reward=payoffs[own[0]] if len(own) == 1 else None,
            role_rewards={role: payoffs[role] for role in own},
            state_id="over",
            metrics=dict(self._metrics),
        )
