"""What the lines of all toy tasks have in common."""

from typing import Any

SYSTEM_PROMPT = "Put the answer in \\boxed{}."
"""The same as `agent.system_prompt` in the tasks' recipes."""


def asked(text: str) -> list[dict[str, Any]]:
    """The messages before the model's first one."""
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": text}]


def call(tool: str, /, **arguments: Any) -> dict[str, Any]:
    """The message that calls a tool."""
    function = {"name": tool, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
