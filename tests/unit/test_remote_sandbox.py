"""What a remote sandbox makes of a server that does not answer as it should."""

import asyncio

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from slimrl.agent.sandbox import remote
from slimrl.agent.sandbox.interface import Program, SandboxError
from slimrl.agent.sandbox.remote import RemoteSandbox
from slimrl.config.schema.agent import SandboxConfig, SandboxLimits

RAN = {
    "status": "Success", "message": "", "compile_result": None,
    "run_result": {"status": "Finished", "execution_time": 0.5, "return_code": 0, "stdout": "é", "stderr": ""},
}  # fmt: skip


async def test_answers_that_are_none_are_named_and_the_next_run_is_as_any(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remote, "ANSWER_S", 0.2)
    never, asked = asyncio.Event(), []

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append((await request.json())["code"])
        match asked[-1]:
            case "late":
                await never.wait()
            case "half":
                response = web.StreamResponse()
                await response.prepare(request)
                await response.write(b"{")
                await never.wait()
            case "500":
                return web.Response(status=500, text="no space")
            case "moved":
                return web.Response(status=302, headers={"Location": "/other"})
            case "other":
                return web.json_response({"status": "Success"})
            case "closed":
                request.transport.abort()
        return web.json_response(RAN)

    app = web.Application()
    app.add_routes([web.post("/run_code", answer)])
    async with TestServer(app) as server:
        sandbox = RemoteSandbox(SandboxConfig(url=str(server.make_url("/")), limits=SandboxLimits(wall_s=0.1)))
        said = {
            "late": "Timeout", "half": "Timeout", "500": "500", "moved": "JSONDecodeError", "other": "run_result",
            "closed": "ServerDisconnectedError",
        }  # fmt: skip
        for code, cause in said.items():
            with pytest.raises(SandboxError, match=cause):
                await sandbox.run(Program(code=code))
            assert (await sandbox.run(Program(code="1"))).stdout == "é"
        never.set()
        await sandbox.close()
    assert asked == [code for pair in said for code in (pair, "1")]
