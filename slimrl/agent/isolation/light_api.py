"""What `slimrl.api` is in another interpreter, where slimrl's own packages need not be: what an environment is made of.

Its other names are there too, for annotations and for functions that are not called there, such as a reward in the
same file.
"""

from typing import Any

from slimrl.agent.environment import Environment, Observation, Turn, answers
from slimrl.agent.tool_call import MalformedCall, ToolCall
from slimrl.data.prompt import Prompt

__all__ = ["Environment", "MalformedCall", "Observation", "Prompt", "ToolCall", "Turn", "answers"]


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)

    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        raise TypeError(f"slimrl.api.{name} needs slimrl's packages, which the interpreter of an environment has not")

    return type(name, (), {"__init__": refuse})
