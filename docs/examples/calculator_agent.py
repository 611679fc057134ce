"""An agent with a calculator, as a script: it reads a problem from stdin and asks OpenAI's API for the answer.

Nothing in it knows of slimrl. Run for each trajectory (docs/gateway.md), it trains the policy that answers it.
"""

import ast
import json
import operator
import sys
from fractions import Fraction

import openai

OPERATIONS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate arithmetic.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "Arithmetic."}},
            "required": ["expression"],
        },
    },
}


def calculator(expression: str) -> str:
    try:
        value = evaluate(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, KeyError, ZeroDivisionError, TypeError, AttributeError):
        return "error: invalid expression"
    return str(value if value.denominator > 1 else value.numerator)


def evaluate(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant):
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -evaluate(node.operand)
    return Fraction(OPERATIONS[type(node.op)](evaluate(node.left), evaluate(node.right)))


def main() -> None:
    client = openai.OpenAI()
    messages = json.loads(sys.stdin.read())["messages"]
    while True:
        message = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL]).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            print(message.content)
            return
        for call in message.tool_calls:
            result = calculator(json.loads(call.function.arguments)["expression"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


if __name__ == "__main__":
    main()
