"""Requests to the endpoint of a reward."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from slimrl.rewards import retries
from slimrl.rewards.http import EndpointBusy, EndpointError, JsonEndpoint


@asynccontextmanager
async def endpoint(
    answer: Callable[[web.Request], Awaitable[web.StreamResponse]], **settings
) -> AsyncIterator[JsonEndpoint]:
    app = web.Application()
    app.add_routes([web.post("/score", answer), web.get("/elsewhere", answer)])
    async with TestServer(app) as server:
        made = JsonEndpoint(str(server.make_url("/")), **settings)
        await made.start()
        try:
            yield made
        finally:
            await made.close()


@pytest.fixture(autouse=True)
def no_delays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(retries.asyncio, "sleep", lambda delay_s, sleep=asyncio.sleep: sleep(min(delay_s, 0.01)))


async def test_a_server_that_does_not_answer_in_time_is_asked_again():
    asked, never = [], asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        asked.append(await request.read())
        if len(asked) == 1:
            await never.wait()
        return web.json_response({"rewards": [1.0]})

    async with endpoint(answer, timeout_s=0.5, retries=1) as scores:
        assert await scores.post("/score", {"a": "\ud800"}) == {"rewards": [1.0]}
        never.set()
    assert asked == [b'{"a": "\\ud800"}'] * 2


async def test_an_answer_that_stays_half_is_late():
    never = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'{"rewards"')
        await never.wait()
        return response

    async with endpoint(answer, timeout_s=0.3, retries=0) as scores:
        with pytest.raises(TimeoutError, match=rf"^{scores.url}/score did not answer within 0\.3 s$"):
            await scores.post("/score", {})
        never.set()


async def test_a_connection_that_breaks_is_made_again_and_named_if_it_always_breaks():
    asked = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(1)
        request.transport.abort()
        return web.Response()

    async with endpoint(answer, retries=2) as scores:
        with pytest.raises(ConnectionError, match=rf"^{scores.url}/score: "):
            await scores.post("/score", {})
    assert len(asked) == 3
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    nobody = JsonEndpoint(url, retries=1)
    await nobody.start()
    with pytest.raises(ConnectionError, match=rf"^{url}/score: Cannot connect"):
        await nobody.post("/score", {})
    await nobody.close()


@pytest.mark.parametrize(
    ("status", "kind", "num_asked"), [(400, EndpointError, 1), (302, EndpointError, 1), (503, EndpointBusy, 3)]
)
async def test_a_status_that_may_be_gone_is_asked_again_and_others_are_not(status: int, kind: type, num_asked: int):
    asked = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.headers.get("Authorization"))
        return web.Response(status=status, body=b"\xff" + b"x" * 900, headers={"Location": "/elsewhere"})

    async with endpoint(answer, retries=2) as scores:
        with pytest.raises(EndpointError, match=rf"^{scores.url}/score: {status}: \ufffdx{{299}}$") as caught:
            await scores.post("/score", {})
    assert caught.type is kind
    assert asked == [None] * num_asked


async def test_an_answer_that_is_no_json_is_refused_and_its_type_does_not_matter(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SCORES_KEY", "secret")
    asked, answers = [], ['{"a": 1}', "<html>"]

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.headers.get("Authorization"))
        return web.Response(text=answers.pop(0), content_type="text/plain")

    async with endpoint(answer, retries=2, api_key_env="SCORES_KEY") as scores:
        assert await scores.post("/score", {}) == {"a": 1}
        with pytest.raises(EndpointError, match=rf"^{scores.url}/score answered with no JSON: <html>$"):
            await scores.post("/score", {})
    assert asked == ["Bearer secret"] * 2


def test_a_key_that_no_header_can_have_is_refused_and_not_shown(monkeypatch):
    monkeypatch.setenv("SCORES_KEY", "top\nsecret")
    with pytest.raises(ValueError, match="api_key_env: the environment's variable SCORES_KEY is no key") as refused:
        JsonEndpoint("http://a", api_key_env="SCORES_KEY")
    assert "secret" not in str(refused.value)
