"""pydantic-ai with an answer of text, or of a type."""

import sys

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from tool import calculator, task


class Answer(BaseModel):
    value: int


output = {"text": str, "structured": Answer}[sys.argv[1]]
print(Agent(OpenAIChatModel("policy"), output_type=output, tools=[calculator]).run_sync(task()).output)
