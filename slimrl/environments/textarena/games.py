"""Games of TextArena (arXiv:2504.11442) for two, each with randomness of its own."""

import copy
import importlib
import random
import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from types import ModuleType
from typing import Any, Self

NAMES = (
    "Alquerque", "Breakthrough", "Briscola", "Checkers", "Chopsticks", "ColonelBlotto", "ConnectFour", "Crusade",
    "GameOfPureStrategy", "HighSociety", "IndianPoker", "IteratedMatchingPennies", "IteratedPrisonersDilemma",
    "IteratedRockPaperScissors", "IteratedTwoThirdsAverage", "KuhnPoker", "LiarsDice", "Nim", "Othello", "PigDice",
    "ReverseTicTacToe", "SimpleNegotiation", "SimpleTak", "TicTacToe", "WildTicTacToe",
)  # fmt: skip
"""The games that were tried here, by TextArena's name without its version"""
NUM_PLAYERS = 2
ROLE = "player_"

# The dictionaries of games that are not played here import nltk: two seconds of CPU time and 60 MB in each process.
sys.modules["textarena.envs.utils.word_lists"] = ModuleType("textarena.envs.utils.word_lists")
_TEXTARENA: Any = importlib.import_module("textarena")
_REGISTRY: Mapping[str, Any] = importlib.import_module("textarena.envs.registration").ENV_REGISTRY
# TextArena imports a game when one is made, which would be in each process of an instance.
for _name in NAMES:
    importlib.import_module(f"textarena.envs.{_name}.env")


def role_of(player: int) -> str:
    return f"{ROLE}{player}"


def refuse_unknown(name: Any) -> None:
    """Raises ValueError: it is no game of TextArena, or one that was not tried here."""
    known = [one for one in _REGISTRY if one.partition("-v")[0] in NAMES and not one.endswith("-raw")]
    if name not in known:
        near = get_close_matches(str(name), known, n=1)
        meant = f"Did you mean {near[0]}?" if near else f"There are {', '.join(NAMES)}, each followed by -v0."
        raise ValueError(f"game {name!r}: none of TextArena's games that are played here. {meant}")


class Game:
    """A game that has begun.

    TextArena draws from Python's global generator. Each game, and each copy of one, sees it in a state of its own.

    Args:
        name: TextArena's id, such as Nim-v0; one that refuse_unknown takes.
        seed: TextArena's, of cards, dice and starting values.
    """

    def __init__(self, name: str, seed: int) -> None:
        self.name = name
        self.heard = dict.fromkeys(range(NUM_PLAYERS), "")
        """All that TextArena has shown each player"""
        self.payoffs: dict[int, float] = {}
        """What each player is paid; empty until the game is over"""
        self.error = ""
        """What TextArena raised at a text, which ends the game"""
        self._random = random.getstate()
        self._env: Any = _TEXTARENA.make(name)
        self._with_own_randomness(lambda: self._env.reset(num_players=NUM_PLAYERS, seed=seed))

    @property
    def player(self) -> int:
        """Whose turn it is"""
        return int(self._env.state.current_player_id)

    @property
    def state(self) -> dict[str, Any]:
        """The state that TextArena keeps"""
        state: dict[str, Any] = self._env.state.game_state
        return state

    @property
    def is_over(self) -> bool:
        return bool(self.payoffs)

    def hear(self) -> str:
        """What the player whose turn it is has not heard yet; all that it is shown, if that is not what it heard before
        and more."""
        player, text = self._env.get_observation()
        before, self.heard[player] = self.heard[player], text
        return text[len(before) :] if text.startswith(before) and text != before else text

    def say(self, text: str) -> bool:
        """Give TextArena the text of the player whose turn it is; whether it took it as a move.

        A text at which TextArena raises loses, and pays the other player nothing: else a player who loses could undo
        the game.
        """
        player, state = self.player, self._env.state
        try:
            done, _ = self._with_own_randomness(lambda: self._env.step(action=text))
        except Exception as error:  # noqa: BLE001 - the parsers of its games may raise anything
            self.error = repr(error)
            self.payoffs = {one: -1.0 if one == player else 0.0 for one in range(NUM_PLAYERS)}
            return False
        if not done:
            return int(state.error_count) == 0
        rewards, facts = self._env.close()
        self.payoffs = {one: float(rewards[one]) for one in range(NUM_PLAYERS)}
        return not facts[player]["invalid_move"]

    def copy(self) -> Self:
        """Another game in the same state, which goes on by itself."""
        other = copy.copy(self)
        other._env = copy.deepcopy(self._env)
        other.heard, other.payoffs = dict(self.heard), dict(self.payoffs)
        return other

    def _with_own_randomness(self, call: Callable[[], Any]) -> Any:
        outer = random.getstate()
        random.setstate(self._random)
        try:
            return call()
        finally:
            self._random = random.getstate()
            random.setstate(outer)
