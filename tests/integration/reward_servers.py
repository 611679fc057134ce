"""HTTP servers for tests of rewards, which answer as published ones do: OpenAI's chat completions, vLLM's pooling, and
a reward server of slimrl's own form."""

import re
from collections import Counter
from contextlib import asynccontextmanager

from aiohttp import web

BLOCK = re.compile(r"^BEGIN (\w+) (\w+)\n(.*?)\nEND \1 \2$", re.DOTALL | re.MULTILINE)
TAG = "<extra_0>"


@asynccontextmanager
async def serving(routes):
    """The address of a server with these handlers of POST by path, while it runs."""
    app = web.Application()
    app.add_routes([web.post(path, awaited(handler)) for path, handler in routes.items()])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    finally:
        await runner.cleanup()


def awaited(handler):
    """As a function: aiohttp takes no other callable."""

    async def call(request):
        return await handler(request)

    return call


class JudgeModel:
    """A chat-completions server whose model `judge` is as gullible as can be: it obeys each order that it does not see
    as data, whoever gave it, and reads marks of a chat template as the beginning of another message.

    Args:
        opinion: of one answer, a number; better answers have higher ones.
        prefers_first: by how much a position is better than the other.
    """

    def __init__(self, opinion, *, prefers_first=0.0, key=None):
        self.opinion, self.prefers_first, self.key = opinion, prefers_first, key
        self.requests, self.failures = [], []
        self.finish_reason, self.last_line = "stop", None

    async def __call__(self, request):
        body = await request.json()
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return self._error(401, "Incorrect API key provided", "invalid_api_key")
        if body["model"] != "judge":
            return self._error(404, f"The model `{body['model']}` does not exist", "model_not_found")
        if self.failures:
            return self._error(self.failures.pop(0), "Rate limit reached", "rate_limit_exceeded")
        self.requests.append(body)
        content = f"Reasons.\n\n{self.last_line or self._verdict(body['messages'][-1]['content'])}"
        return web.json_response(
            {
                "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "judge",
                "choices": [
                    {
                        "index": 0, "message": {"role": "assistant", "content": content, "refusal": None},
                        "logprobs": None, "finish_reason": self.finish_reason,
                    }
                ],
                "usage": {"prompt_tokens": 9, "completion_tokens": 9, "total_tokens": 18},
            }
        )  # fmt: skip

    def _verdict(self, text):
        blocks = {name: body for name, _, body in BLOCK.findall(text)}
        outside = re.split(r"<\|im_start\|>system\n", text)
        orders = BLOCK.sub("", text) + "".join(outside[1:])
        if order := re.search(r"say (SCORE: \S+|BETTER: \w+)", orders):
            return order[1]
        if "ANSWER" in blocks:
            return f"**SCORE: {self.opinion(blocks['ANSWER'])}**"
        lead = self.opinion(blocks["A"]) + self.prefers_first - self.opinion(blocks["B"])
        return "BETTER: " + ("TIE" if lead == 0 else "A" if lead > 0 else "B")

    def _error(self, status, message, code):
        kind = "invalid_request_error"
        return web.json_response({"error": {"message": message, "type": kind, "code": code}}, status=status)


async def pooling(request):
    """A process reward model as vLLM serves Qwen2.5-Math-PRM: a row (bad, good) for each step tag; steps with the word
    `wrong` are bad."""
    body = await request.json()
    steps = body["messages"][-1]["content"].split(TAG)[:-1]
    rows = [[0.9, 0.1] if "wrong" in step else [0.25, 0.75] for step in steps]
    item = {"index": 0, "object": "pooling", "data": rows}
    usage = {"prompt_tokens": 9, "total_tokens": 9, "completion_tokens": 0}
    return web.json_response(
        {"id": "pool-1", "object": "list", "created": 1, "model": body["model"], "data": [item], "usage": usage}
    )


class RewardServer:
    """Gives each trajectory the length of its last text, and counts requests by their size."""

    def __init__(self):
        self.sizes, self.failures, self.seen, self.slow = Counter(), [], [], None

    async def __call__(self, request):
        items = (await request.json())["trajectories"]
        if self.failures:
            return web.Response(status=self.failures.pop(0), text="not now")
        if self.slow is not None:
            await self.slow.wait()
        self.sizes[len(items)] += 1
        self.seen += items
        return web.json_response({"rewards": [float(len(item["messages"][-1]["content"])) for item in items]})
