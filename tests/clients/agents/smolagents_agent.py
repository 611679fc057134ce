"""smolagents: ToolCallingAgent or CodeAgent."""

import os
import sys

from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool
from tool import calculator, task

model = OpenAIServerModel("policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
make = {"tools": ToolCallingAgent, "code": CodeAgent}[sys.argv[1]]
print(make(tools=[tool(calculator)], model=model).run(task()))
