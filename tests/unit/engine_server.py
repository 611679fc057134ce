"""Engines as their clients see them: web servers of this process that answer, hang or break off."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer


class EngineServer:
    """Answers each request with one token and the log-probs of its input, or does what `script` says next, else
    `action`: a status, "hang" or "cut off"."""

    def __init__(self, token: int | None = None) -> None:
        """
        Args:
            token: of its answers; None for a request's first.
        """
        self.token = token
        self.script: list[int | str] = []
        self.action: int | str = ""
        self.slow = 0.0
        """Seconds until an answer"""
        self.group: int | None = None
        """Data-parallel rank of the engine that answers"""
        self.experts: str | None = None
        self.refused: int | None = None
        """First token of a turn that is refused"""
        self.bodies: list[dict] = []
        self.aborted: list[str] = []
        self.under_way = self.most_under_way = 0
        self.url = ""

    @property
    def rids(self) -> list[str]:
        return [body["rid"] for body in self.bodies]

    async def asked(self, count: int) -> None:
        """Wait until it has had so many requests."""
        async with asyncio.timeout(10):
            while len(self.bodies) < count:
                await asyncio.sleep(0.01)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies += _turns(body) if body.get("stream") else [body]
        turns = len(body["rid"]) if body.get("stream") else 1
        self.under_way += turns
        self.most_under_way = max(self.most_under_way, self.under_way)
        action = self.script.pop(0) if self.script else self.action
        await asyncio.sleep(60 if action == "hang" else self.slow)
        self.under_way -= turns
        if action == "cut off":
            assert request.transport is not None
            request.transport.abort()
        if not body.get("stream") and body["input_ids"][0] == self.refused and self.refused is not None:
            action = 400
        if isinstance(action, int):
            return web.json_response({"error": "not now"}, status=action)
        if body.get("stream"):
            return await self._stream(request, body["input_ids"])
        several = isinstance(body["rid"], list)
        answers = [self._answer(tokens) for tokens in (body["input_ids"] if several else [body["input_ids"]])]
        return web.json_response(answers if several else answers[0])

    async def _stream(self, request: web.Request, inputs: list[list[int]]) -> web.StreamResponse:
        """As SGLang does: an event with each turn's first token, one with its end, the last turn first."""
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for finish in (None, {"type": "stop"}):
            for index in reversed(range(len(inputs))):
                answer = self._answer(inputs[index])
                answer["meta_info"]["finish_reason"] = finish
                if finish and inputs[index][0] == self.refused:
                    answer["meta_info"] = {"finish_reason": {"type": "abort", "status_code": 400, "message": "no"}}
                await response.write(f"data: {json.dumps({**answer, 'index': index})}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    def _answer(self, tokens: list[int]) -> dict[str, Any]:
        token = tokens[0] if self.token is None else self.token
        meta: dict[str, Any] = {
            "output_token_logprobs": [[-0.5, token]],
            "input_token_logprobs": [[None, tokens[0]], *([-one, one] for one in tokens[1:])],
            "weight_versions": [{"version": "4", "start": 0, "end": 1}],
            "finish_reason": {"type": "stop"},
            "cached_tokens": 0,
        }
        if self.group is not None:
            meta["dp_rank"] = self.group
        if self.experts is not None:
            meta["routed_experts"] = self.experts
        return {"meta_info": meta}

    async def abort(self, request: web.Request) -> web.Response:
        self.aborted.append((await request.json())["rid"])
        return web.Response()


def _turns(body: dict) -> list[dict]:
    """The bodies that the turns of a request would have by themselves, in which `together` is how many they are."""
    listed = {name: body[name] for name in ("rid", "input_ids", "sampling_params")}
    values = [dict(zip(listed, turn, strict=True)) for turn in zip(*listed.values(), strict=True)]
    return [{**body, **turn, "together": len(values)} for turn in values]


@asynccontextmanager
async def serving(*engines: EngineServer) -> AsyncIterator[None]:
    """They have addresses meanwhile."""
    async with AsyncExitStack() as running:
        for engine in engines:
            app = web.Application()
            app.router.add_post("/generate", engine.generate)
            app.router.add_post("/abort_request", engine.abort)
            server = await running.enter_async_context(TestServer(app))
            engine.url = str(server.make_url("")).rstrip("/")
        yield
