"""The calculator's agent as a function: recipes/tiny_moe/gspo_calculator_gateway.yaml trains the policy behind it."""

import json
from collections.abc import Mapping
from typing import Any

import httpx
import openai

from slimrl.agent.calculator import calculator
from slimrl.agent.environment import error_text
from slimrl.agent.gateway.connection import Connection
from slimrl.agent.tools import ToolError, make_tool

SCHEMA: Any = make_tool(calculator).schema


async def solve(line: Mapping[str, Any], connection: Connection) -> None:
    """Ask the policy, answer its calls, and ask again until it calls no more."""
    # Certificates, which a client reads at its start, would take longer than its requests; there is no TLS here.
    plain = httpx.AsyncClient(verify=False, trust_env=False)
    async with openai.AsyncOpenAI(
        base_url=connection.openai_base_url, api_key=connection.api_key, http_client=plain
    ) as client:
        messages: list[Any] = list(line["messages"])
        while True:
            answer = await client.chat.completions.create(model="policy", messages=messages, tools=[SCHEMA])
            message = answer.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                return
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": _result(call.function.arguments)}
                for call in message.tool_calls
                if call.type == "function"
            ]


def _result(arguments: str) -> str:
    try:
        return calculator(**json.loads(arguments))
    except ToolError as error:
        return error_text(str(error))
