"""openai-agents, through Responses (its default) or chat completions."""

import sys

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled
from tool import calculator, task

set_tracing_disabled(True)
set_default_openai_api(sys.argv[1])
agent = Agent(name="solver", instructions="Solve it.", model="policy", tools=[function_tool(calculator)])
print(Runner.run_sync(agent, task()).final_output)
