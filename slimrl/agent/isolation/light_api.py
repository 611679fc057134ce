"""What `slimrl.api` is in another interpreter, where slimrl's own packages need not be: the names that an environment
is made of."""

from slimrl.agent.environment import Environment, Observation, Turn, answers
from slimrl.agent.tool_call import MalformedCall, ToolCall
from slimrl.data.prompt import Prompt

__all__ = ["Environment", "MalformedCall", "Observation", "Prompt", "ToolCall", "Turn", "answers"]
