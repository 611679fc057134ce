"""Conversations of mixed quality for the cold start on generated tasks.

Each request is met rightly or with one of the mistakes of its kind; the answers are those of the package's classes. A
model that imitates them can make every right call, and mostly makes another.
"""

import random
from typing import Any

from slimrl.environments.bfcl.calls import Instances
from slimrl.environments.bfcl.functions import Descriptions, first_tools
from slimrl.environments.bfcl.generated import Task

RIGHT_PROBABILITY = 0.4
"""Probability that a request is met rightly"""
ANSWER = "Done."


def demonstration(task: Task, rng: random.Random, descriptions: Descriptions = "short") -> dict[str, Any]:
    """A line of a file of conversations (docs/data_formats.md)."""
    instances = Instances(task.entry, task.entry.functions or ())
    messages: list[dict[str, Any]] = []
    for request in task.requests:
        messages.append({"role": "user", "content": request.text})
        is_right = rng.random() < RIGHT_PROBABILITY
        for name, arguments in request.calls(request.kind.right if is_right else rng.choice(request.kind.mistakes)):
            function = {"name": name, "arguments": arguments}
            called = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
            messages += [called, {"role": "tool", "content": instances.call(name, arguments)[0]}]
        messages.append({"role": "assistant", "content": ANSWER})
    return {"messages": messages, "tools": first_tools(task.entry, descriptions)}
