"""langchain's agent with an answer of text, or of a type."""

import sys

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from tool import calculator, task


class Answer(BaseModel):
    value: int


form = {"text": None, "structured": Answer}[sys.argv[1]]
agent = create_agent(ChatOpenAI(model="policy"), tools=[calculator], response_format=form)
done = agent.invoke({"messages": [("user", task())]})
print(done["structured_response"] if form else done["messages"][-1].content)
