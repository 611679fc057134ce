"""Requests to the endpoint of a reward."""

import asyncio
from functools import partial

import httpx

from slimrl.rewards.http import JsonEndpoint


async def test_a_server_that_does_not_answer_in_time_is_asked_again(monkeypatch):
    asked = []

    async def answer(request):
        asked.append(request.url.path)
        if len(asked) == 1:
            await asyncio.sleep(60)
        return httpx.Response(200, json={"rewards": [1.0]})

    client = partial(httpx.AsyncClient, transport=httpx.MockTransport(answer))
    monkeypatch.setattr("slimrl.rewards.http.httpx.AsyncClient", client)
    endpoint = JsonEndpoint("http://rewards", timeout_s=0.5, retries=1)
    await endpoint.start()
    assert await endpoint.post("/score", {}) == {"rewards": [1.0]}
    await endpoint.close()
    assert asked == ["/score", "/score"]
