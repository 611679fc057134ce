"""Scripted players of TextWorld's games, and what every game of text with a list of commands can be played by."""

import random

from slimrl.agent.environment import Observation, Turn
from slimrl.data.prompt import Prompt
from slimrl.environments.textworld.text_game import COMMANDS, SEPARATOR


class Solver:
    """Plays the walkthrough in the prompt's metadata."""

    def __init__(self, prompt: Prompt, seed: int) -> None:
        self._commands = list(prompt.metadata["walkthrough"])
        self._index = 0

    def turn(self, observation: Observation) -> Turn:
        """Raises IndexError: the walkthrough is at its end and the game is not."""
        self._index += 1
        return Turn(index=self._index - 1, text=self._commands[self._index - 1])


class RandomPlayer:
    """Picks among the commands that it is shown."""

    def __init__(self, prompt: Prompt, seed: int) -> None:
        self._chance = random.Random(seed)
        self._index = 0

    def turn(self, observation: Observation) -> Turn:
        self._index += 1
        return Turn(index=self._index - 1, text=self._chance.choice(shown_commands(observation)))


class MixedPlayer:
    """Follows the walkthrough as far as it is told to, and otherwise picks among the commands that it is shown."""

    def __init__(self, prompt: Prompt, seed: int, skill: float) -> None:
        """
        Args:
            skill: probability that a turn is the walkthrough's next command.
        """
        self._solver, self._random = Solver(prompt, seed), RandomPlayer(prompt, seed)
        self._chance, self._skill = random.Random(f"skill {seed}"), skill
        self._left = len(prompt.metadata["walkthrough"])

    def turn(self, observation: Observation) -> Turn:
        if self._left and self._chance.random() < self._skill:
            self._left -= 1
            return self._solver.turn(observation)
        return self._random.turn(observation)


def shown_commands(observation: Observation) -> list[str]:
    """The list at the end of the last message.

    Raises:
        ValueError: it has none.
    """
    last = str(observation.messages[-1]["content"]).splitlines()[-1]
    if not last.startswith(COMMANDS):
        raise ValueError("The environment shows no commands. This player needs show_commands: true.")
    return last.removeprefix(COMMANDS).split(SEPARATOR)
