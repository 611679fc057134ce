"""Players by script, which read the text that the policy reads."""

import random

from slimrl.agent.environment import Observation, Turn
from slimrl.data.prompt import Prompt
from slimrl.environments.miniwob import longer_scripts, scripts
from slimrl.environments.miniwob.page_reader import Page

SCRIPTS = {**scripts.SCRIPTS, **longer_scripts.SCRIPTS}
"""Task -> the script that solves it"""


class Solver:
    """Earns the reward of the tasks of SCRIPTS.

    Raises:
        ValueError: there is no script for the prompt's task.
    """

    def __init__(self, prompt: Prompt, seed: int) -> None:
        self._task = prompt.metadata["task"]
        if self._task not in SCRIPTS:
            raise ValueError(f"there is no script for {self._task}; there are some for {', '.join(sorted(SCRIPTS))}")
        self._script: scripts.Script | None = None
        self._num_turns = 0

    def turn(self, observation: Observation) -> Turn:
        page = Page(str(observation.messages[-1]["content"]))
        if self._script is None:
            self._script = SCRIPTS[self._task](page.goal, page)
            action = next(self._script)
        else:
            action = self._script.send(page)
        self._num_turns += 1
        return Turn(index=self._num_turns - 1, text=action)


class RandomPlayer:
    """Clicks an element at random."""

    def __init__(self, prompt: Prompt, seed: int) -> None:
        self._random = random.Random(seed)
        self._num_turns = 0

    def turn(self, observation: Observation) -> Turn:
        numbers = Page(str(observation.messages[-1]["content"])).numbers
        self._num_turns += 1
        action = f"click({self._random.choice(numbers)})" if numbers else "noop()"
        return Turn(index=self._num_turns - 1, text=action)
