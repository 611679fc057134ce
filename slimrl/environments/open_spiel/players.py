"""Scripted players of OpenSpiel's games. Needs the standard library alone."""

import random

from slimrl.agent.environment import Observation, Turn
from slimrl.data.prompt import Prompt

MOVES, SEPARATOR = "Moves: ", " | "
"""Start of the line that lists the moves, and what is between them"""


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
    """Picks among the moves that it is shown, of all roles."""

    def __init__(self, prompt: Prompt, seed: int) -> None:
        self._chance, self._index = random.Random(seed), 0

    def turn(self, observation: Observation) -> Turn:
        self._index += 1
        return Turn(index=self._index - 1, text=self._chance.choice(shown_moves(observation)))


def shown_moves(observation: Observation) -> list[str]:
    """The list at the end of the last message."""
    return str(observation.messages[-1]["content"]).rpartition(MOVES)[2].split(SEPARATOR)
