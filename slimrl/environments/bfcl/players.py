"""Players by script: one that makes the calls of the ground truth, one that calls anything."""

import random
from typing import Any

from slimrl.agent.environment import Observation, Turn
from slimrl.agent.tool_call import ToolCall
from slimrl.data.prompt import Prompt

ANSWER_PROBABILITY = 0.3
"""Probability of a random player's turn without a call"""
WORDS = ("a", "file.txt", "documents", "AAPL", "on", "1", "/")


class Solver:
    """Makes the calls of the ground truth, those of a user turn at once, and then answers."""

    def __init__(self, prompt: Prompt, seed: int) -> None:
        self._left: list[list[dict[str, Any]]] = [list(calls) for calls in prompt.metadata["solution"]]
        self._index = -1

    def turn(self, observation: Observation) -> Turn:
        self._index += 1
        calls = self._left[0]
        if not calls:
            self._left.pop(0)
            return Turn(index=self._index, text="Done.")
        self._left[0] = []
        return Turn(index=self._index, text="", calls=tuple(ToolCall(**call) for call in calls))


class RandomPlayer:
    """Calls random tools with random values of the right types."""

    def __init__(self, prompt: Prompt, seed: int) -> None:
        self._rng = random.Random(seed)
        self._tools: list[dict[str, Any]] = []
        self._index = -1

    def turn(self, observation: Observation) -> Turn:
        self._index += 1
        self._tools = self._tools or list(observation.tools or ())
        if self._rng.random() < ANSWER_PROBABILITY:
            return Turn(index=self._index, text="Done.")
        tool = self._rng.choice(self._tools)["function"]
        call = ToolCall(name=tool["name"], arguments=self._value(tool["parameters"]))
        return Turn(index=self._index, text="", calls=(call,))

    def _value(self, schema: dict[str, Any]) -> Any:
        match schema.get("type"):
            case "object":
                required = schema.get("required", ())
                given = schema.get("properties", {}).items()
                return {name: self._value(one) for name, one in given if name in required or self._rng.random() < 0.5}
            case "array":
                return [self._value(schema.get("items", {})) for _ in range(self._rng.randint(1, 2))]
            case "integer":
                return self._rng.randint(0, 9)
            case "number":
                return round(self._rng.uniform(0, 100), 1)
            case "boolean":
                return self._rng.random() < 0.5
        return self._rng.choice(schema.get("enum", WORDS))
