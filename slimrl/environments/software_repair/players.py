"""Scripted players of software repair."""

import random

from slimrl.agent.environment import Observation, Turn
from slimrl.agent.tool_call import ToolCall
from slimrl.data.prompt import Prompt
from slimrl.environments.software_repair import patches


class Solver:
    """Undoes the bug with `edit`, then submits."""

    def __init__(self, prompt: Prompt, seed: int) -> None:
        self._patch = prompt.metadata["patch"]
        self._turn = 0

    def turn(self, observation: Observation) -> Turn:
        self._turn += 1
        if self._turn > 1:
            return Turn(index=self._turn - 1, text="", calls=(ToolCall(name="submit", arguments={}, id="0"),))
        path = patches.path_of(self._patch)
        edits = [{"path": path, "old": hunk.old, "new": hunk.new} for hunk in patches.hunks(self._patch)]
        calls = [ToolCall(name="edit", arguments=edit, id=str(number)) for number, edit in enumerate(edits)]
        return Turn(index=0, text="", calls=tuple(calls))


class RandomPlayer:
    """Takes lines away from the package's code, at random, and submits at a random turn."""

    def __init__(self, prompt: Prompt, seed: int) -> None:
        self._random = random.Random(f"{prompt.prompt_id} {seed}")
        self._code = prompt.metadata["code"]
        self._turn = 0

    def turn(self, observation: Observation) -> Turn:
        self._turn += 1
        if self._random.random() < 0.4:
            call = ToolCall(name="submit", arguments={}, id="0")
        else:
            number = self._random.randrange(1, 200)
            command = f"find {self._random.choice(self._code)} -name '*.py' | sort | head -3 | xargs sed -i {number}d"
            call = ToolCall(name="bash", arguments={"command": command}, id="0")
        return Turn(index=self._turn - 1, text="", calls=(call,))
