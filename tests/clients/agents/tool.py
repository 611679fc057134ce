"""What the agents of frameworks have in common: the task, and a calculator."""

import json
import sys


def task() -> str:
    return json.load(sys.stdin)["messages"][-1]["content"]


def calculator(expression: str) -> str:
    """Evaluate arithmetic.

    Args:
        expression: Arithmetic.
    """
    return str(eval(expression, {"__builtins__": {}}))
