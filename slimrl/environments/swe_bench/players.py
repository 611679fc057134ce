"""Scripted players of SWE-bench."""

import random

from slimrl.agent.environment import Observation, Turn
from slimrl.agent.tool_call import ToolCall
from slimrl.data.prompt import Prompt


class Solver:
    """Applies the reference repair with `bash`, then submits."""

    def __init__(self, prompt: Prompt, seed: int) -> None:
        self._patch = prompt.metadata["patch"]
        self._turn = 0

    def turn(self, observation: Observation) -> Turn:
        self._turn += 1
        if self._turn > 1:
            return Turn(index=self._turn - 1, text="", calls=(ToolCall(name="submit", arguments={}, id="0"),))
        command = f"git apply - <<'END_OF_THE_PATCH'\n{self._patch.rstrip('\n')}\nEND_OF_THE_PATCH"
        return Turn(index=0, text="", calls=(ToolCall(name="bash", arguments={"command": command}, id="0"),))


class RandomPlayer:
    """Takes lines away from Python files of the repository, at random, and submits at a random turn."""

    def __init__(self, prompt: Prompt, seed: int) -> None:
        self._random = random.Random(f"{prompt.prompt_id} {seed}")
        self._turn = 0

    def turn(self, observation: Observation) -> Turn:
        self._turn += 1
        if self._random.random() < 0.4:
            call = ToolCall(name="submit", arguments={}, id="0")
        else:
            file, line = self._random.randrange(1, 20), self._random.randrange(1, 200)
            command = f"git ls-files '*.py' | sed -n {file}p | xargs -r sed -i {line}d"
            call = ToolCall(name="bash", arguments={"command": command}, id="0")
        return Turn(index=self._turn - 1, text="", calls=(call,))
