"""Plans that a model proposes, behind an OpenAI-compatible endpoint."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from slimrl_tools.synthesis.forward.plan import ASKS, REFERENCE, Plan, Step, texts
from slimrl_tools.synthesis.rewriting import MAX_TOKENS, content

from slimrl.rewards.http import EndpointError
from slimrl.rewards.remote import endpoint
from slimrl.rewards.verdicts import COMPLETIONS

AT_ONCE = 8
"""Requests at once"""
SHOWN = 8
"""Last questions that the model is shown, so that it does not ask them again"""
TASK = """These tools can be called:
{tools}

Make up a plan of exactly {count} calls whose last result answers a question that nobody answers without the tools. \
A later call takes the result of an earlier one: {{#1}} stands for the result of the first call, {{#2}} for that of \
the second. Every call must be needed. Answer with one JSON object and nothing else:
{{"steps": [{{"tool": NAME, "arguments": OBJECT, "says": NOUN, "result": WORDS}}], "asks": QUESTION}}
NOUN says what the result is, with {{#1}} where it names the first result, such as "the sum of 3 and {{#1}}". WORDS \
are empty if the tool's answer is the result; else they are the words of the answer around it with {{}} in its place, \
such as "was born in {{}}.". QUESTION has {{}} once, where the last noun stands, such as "What is {{}}?".{known}"""


class ModelPlans:
    """
    Args:
        url: base of the API, up to `/v1`.
        key_env: environment variable with the key; empty for none.
        schemas: of the tools.
    """

    max_tries = 64
    """Proposals in a row of which none becomes a task"""

    def __init__(self, url: str, model: str, key_env: str, schemas: Sequence[Mapping[str, Any]]) -> None:
        self._url, self._model, self._key_env = url, model, key_env
        self._tools = "\n".join(json.dumps(schema["function"]) for schema in schemas)
        self._waiting: dict[int, list[str]] = {}
        self._asked: list[str] = []
        self._num_requests = 0

    def draw(self, num_steps: int) -> Plan | None:
        """A plan of so many steps; None if the model proposed none.

        Raises:
            ValueError: the endpoint refuses, or its answer is no chat completion.
            ConnectionError, TimeoutError: it does not answer.
        """
        waiting = self._waiting.setdefault(num_steps, [])
        if not waiting:
            try:
                waiting += asyncio.run(self._proposals(num_steps))
            except EndpointError as error:
                raise ValueError(f"--plan-url: {error}") from error
        plan = read_plan(waiting.pop())
        if plan is None or len(plan.steps) != num_steps:
            return None
        self._asked = [*self._asked, plan.question][-SHOWN:]
        return plan

    async def _proposals(self, num_steps: int) -> list[str]:
        known = f"\n\nAsk something else than: {' '.join(self._asked)}" if self._asked else ""
        task = TASK.format(tools=self._tools, count=num_steps, known=known)
        # A client belongs to the event loop in which it was started.
        api = endpoint(self._url, {"api_key_env": self._key_env}, adds=COMPLETIONS)
        await api.start()
        try:
            requests = []
            for _ in range(AT_ONCE):
                self._num_requests += 1
                requests.append({
                    "model": self._model, "max_tokens": MAX_TOKENS, "temperature": 1.0, "seed": self._num_requests,
                    "messages": [{"role": "user", "content": task}],
                })  # fmt: skip
            return [content(one) for one in await asyncio.gather(*(api.post(COMPLETIONS, one) for one in requests))]
        finally:
            await api.close()


def read_plan(text: str) -> Plan | None:
    """The plan in a model's answer, between its first and its last brace; None if there is none."""
    begin, end = text.find("{"), text.rfind("}")
    try:
        value = json.loads(text[begin : end + 1])
        steps = [_step(one) for one in value["steps"]]
        return Plan(steps=tuple(steps), asks=str(value.get("asks", ASKS)))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _step(value: Any) -> Step:
    tool, arguments, says, result = (value[key] for key in ("tool", "arguments", "says", "result"))
    if not all(isinstance(one, str) for one in (tool, says, result)) or not isinstance(arguments, dict):
        raise ValueError("a step has a tool, an object of arguments, and words")
    taken = [f"{{#{number}}}" for text in texts(arguments) for number in REFERENCE.findall(text)]
    return Step(tool=tool, arguments=arguments, says=says, result=result, inputs=tuple(dict.fromkeys(taken)))
