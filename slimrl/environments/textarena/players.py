"""Scripted players of TextArena's games. Needs the standard library alone."""

import random

from slimrl.agent.environment import Observation, Turn
from slimrl.data.prompt import Prompt
from slimrl.environments.textarena.moves import candidates


class Solver:
    """Plays the moves in the prompt's metadata, which win against the opponent `first`."""

    def __init__(self, prompt: Prompt, seed: int) -> None:
        """Raises ValueError: the prompt has none."""
        if "solution" not in prompt.metadata:
            raise ValueError(f"{prompt.prompt_id}: a solution is known against the opponent `first` alone")
        self._moves, self._index = list(prompt.metadata["solution"]), 0

    def turn(self, observation: Observation) -> Turn:
        self._index += 1
        return Turn(index=self._index - 1, text=self._moves[self._index - 1])


class RandomPlayer:
    """Picks among the moves that a role is shown, or else among all that the game has, for all roles."""

    def __init__(self, prompt: Prompt, seed: int) -> None:
        self._game, self._chance, self._index = str(prompt.metadata["game"]), random.Random(seed), 0
        self._heard: dict[str, str] = {}

    def turn(self, observation: Observation) -> Turn:
        self._index += 1
        heard = self._heard.get(observation.role, "") + str(observation.messages[-1]["content"])
        self._heard[observation.role] = heard
        return Turn(index=self._index - 1, text=self._chance.choice(candidates(self._game, heard)))
