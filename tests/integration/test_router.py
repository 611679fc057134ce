"""The real router before engines that are no more than web servers of this process."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from slimrl.rollout.client import ROUTING_HEADER
from slimrl.rollout.servers.ports import free_ports
from slimrl.rollout.servers.router import Router

pytestmark = [pytest.mark.integration, pytest.mark.timeout(60)]


@pytest.fixture
async def engine_urls() -> AsyncIterator[list[str]]:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"port": request.url.port, "model_path": "m", "weight_version": "0"})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as first, TestServer(app) as second:
        yield [str(server.make_url("")).rstrip("/") for server in (first, second)]


async def test_the_router_asks_the_engines_and_not_the_proxy_of_its_environment(
    engine_urls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (nobody,) = free_ports(1)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{nobody}")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    router = Router(engine_urls, tmp_path / "router.log", timeout_s=20, request_timeout_s=10)
    try:
        await asyncio.to_thread(router.wait_ready)
        async with aiohttp.ClientSession() as session:
            for number in range(4):
                headers = {ROUTING_HEADER: f"s{number}"}
                async with session.post(f"{router.url}/generate", json={"input_ids": [1]}, headers=headers) as response:
                    assert response.status == 200
                    assert (await response.json())["port"] in [int(url.rsplit(":")[-1]) for url in engine_urls]
    finally:
        await asyncio.to_thread(router.stop)
