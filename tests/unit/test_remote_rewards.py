"""Rewards of a server of one's own: what its requests hold."""

import asyncio
import json

from aiohttp import web
from aiohttp.test_utils import TestServer
from reward_cases import asked, said

from slimrl.rewards.remote import Remote


def refuse(constant):
    raise ValueError(f"{constant} is no JSON")


async def test_numbers_in_a_call_that_are_no_json_spoil_no_reward_of_the_batch():
    sizes = []

    async def answer(request):
        items = json.loads(await request.text(), parse_constant=refuse)["trajectories"]
        sizes.append(len(items))
        return web.json_response({"rewards": [len(item["messages"]) for item in items]})

    app = web.Application()
    app.add_routes([web.post("/", answer)])
    arguments = {"a": float("nan"), "b": [float("-inf")]}
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    odd = said("x", before=[{"role": "assistant", "content": "", "tool_calls": calls}])
    async with TestServer(app) as server:
        reward = Remote(url=str(server.make_url("/")), max_batch=2, batch_s=10.0, retries=0)
        await reward.start()
        try:
            given = await asyncio.gather(reward(odd, asked()), reward(said("x"), asked()))
        finally:
            await reward.close()
    assert given == [2, 1]
    assert sizes == [0, 2]
