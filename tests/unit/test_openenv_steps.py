"""Environments of OpenEnv, with a server that answers as the protocol says."""

from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from slimrl.agent.adapters.openenv import OpenEnvEnvironment
from slimrl.agent.environment import Turn
from slimrl.agent.tool_call import ToolCall
from slimrl.data.prompt import Prompt

PROMPT = Prompt(prompt_id="p", messages=[{"role": "user", "content": "Begin."}], label=None)


def server_of(rewards: list[float | None]) -> TestServer:
    """A server whose steps have these rewards."""

    async def schema(request: web.Request) -> web.Response:
        return web.json_response({"action": {"type": "object", "properties": {"letter": {"type": "string"}}}})

    async def talk(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        left = list(rewards)
        async for message in socket:
            given: dict[str, Any] = {"reward": left.pop(0)} if message.json()["type"] == "step" else {}
            data = {"observation": {"left": len(left)}, "done": False, **given}
            await socket.send_json({"type": "observation", "data": data})
        return socket

    app = web.Application()
    app.add_routes([web.get("/schema", schema), web.get("/ws", talk)])
    return TestServer(app)


@pytest.mark.parametrize(
    ("rewards", "sum_of_them"), [([1.0, 0.25], 1.25), ([1.0, None, 0.25, None], 1.25), ([None, None], None)]
)
async def test_a_turn_of_several_calls_has_the_sum_of_their_rewards(rewards, sum_of_them):
    async with server_of(rewards) as server:
        environment = OpenEnvEnvironment(str(server.make_url("/")))
        try:
            await environment.start(PROMPT, seed=1, scratch={})
            calls = tuple(ToolCall(name="act", arguments={"letter": "a"}) for _ in rewards)
            observation = await environment.step(Turn(index=0, text="", calls=calls))
        finally:
            await environment.close()
    assert observation.reward == sum_of_them
    assert len(observation.messages) == len(rewards)
