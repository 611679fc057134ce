"""Turns and observations as JSON, for environments in other processes. Needs the standard library alone."""

import base64
from collections.abc import Mapping
from typing import Any

from slimrl.agent.environment import Observation, Turn
from slimrl.agent.tool_call import MalformedCall, ToolCall


def read_turn(data: Mapping[str, Any]) -> Turn:
    calls = (MalformedCall(**call) if "problem" in call else ToolCall(**call) for call in data["calls"])
    return Turn(**{**data, "calls": tuple(calls)})


def observation_json(observation: Observation) -> dict[str, Any]:
    """The fields that the protocol has no place of its own for: all but `reward` and `done`."""
    values = {name: value for name, value in vars(observation).items() if name not in ("reward", "done")}
    image = observation.image
    return {**values, "image": None if image is None else base64.b64encode(image).decode()}


def read_observation(data: Mapping[str, Any]) -> Observation:
    """
    Args:
        data: of the server's answer: `observation`, `reward` and `done`.
    """
    values = dict(data["observation"])
    image = values.pop("image")
    image = None if image is None else base64.b64decode(image)
    return Observation(**values, image=image, reward=data["reward"], done=data["done"])
