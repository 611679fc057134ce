"""A loop over litellm, through OpenAI's API or Anthropic's."""

import json
import os
import sys

import litellm
from tool import calculator, task

TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate arithmetic.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
api = sys.argv[1]
base = {"openai": os.environ["OPENAI_BASE_URL"], "anthropic": os.environ["ANTHROPIC_BASE_URL"]}[api]
messages = [{"role": "user", "content": task()}]
while True:
    answer = litellm.completion(model=f"{api}/policy", messages=messages, tools=[TOOL], api_base=base, max_tokens=512)
    message = answer.choices[0].message
    messages.append(message)
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        result = calculator(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
print(message.content)
