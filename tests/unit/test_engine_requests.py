"""Requests to an engine that answers late, not at all or at the second time of asking: a server in this process."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from slimrl.data.engine import EngineError, GenerateRequest
from slimrl.rollout import client
from slimrl.rollout.client import SglangEngine
from slimrl.rollout.routing import RoutedEngines
from slimrl.rollout.servers.ports import free_ports

META = {
    "output_token_logprobs": [[-0.5, 7, None]],
    "weight_versions": [{"version": "4", "start": 0, "end": 1}],
    "finish_reason": {"type": "stop"},
    "cached_tokens": 0,
}


class Server:
    """Does with each request to generate what `script` says next: a status, "hang", "cut off", or an answer."""

    def __init__(self) -> None:
        self.script: list[int | str] = []
        self.asked: list[dict] = []
        self.aborted: list[str] = []
        self.group: int | None = None
        """Of an engine's ranks, that answers"""
        self.url = ""

    async def generate(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        action = self.script.pop(0) if self.script else "answer"
        if action == "hang":
            await asyncio.sleep(60)
        if action == "cut off":
            assert request.transport is not None
            request.transport.abort()
        if isinstance(action, int):
            return web.json_response({"error": "not now"}, status=action)
        answer = {"meta_info": META | ({} if self.group is None else {"dp_rank": self.group})}
        return web.json_response([answer] * len(rids) if isinstance(rids := self.asked[-1]["rid"], list) else answer)

    async def abort(self, request: web.Request) -> web.Response:
        self.aborted.append((await request.json())["rid"])
        return web.Response()

    def rids(self) -> list[str]:
        return [body["rid"] for body in self.asked]


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    there = Server()
    app = web.Application()
    app.router.add_post("/generate", there.generate)
    app.router.add_post("/abort_request", there.abort)
    async with TestServer(app) as running:
        there.url = str(running.make_url("")).rstrip("/")
        yield there


@pytest.fixture
async def connect() -> AsyncIterator[Callable[[str], SglangEngine]]:
    engines = []

    def begin(url: str) -> SglangEngine:
        engines.append(SglangEngine(url))
        return engines[-1]

    yield begin
    for engine in engines:
        await engine.aclose()


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "RETRY_DELAYS_S", (0.01, 0.02, 0.03))


def ask(session: str = "s", timeout_s: float = 20.0) -> GenerateRequest:
    return GenerateRequest(
        session_id=session, input_ids=[1, 2], temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=4,
        stop_token_ids=(), timeout_s=timeout_s, seed=11,
    )  # fmt: skip


async def test_what_is_not_answered_by_the_deadline_is_aborted_and_not_asked_again(server: Server, connect):
    server.script = ["hang"]
    engine = connect(server.url)
    with pytest.raises(EngineError, match=r"session late: no answer within 0\.1 s"):
        await engine.generate(ask("late", timeout_s=0.1))
    await engine.aclose()
    assert server.aborted == server.rids()
    assert len(server.asked) == 1


async def test_a_session_keeps_to_the_group_of_ranks_that_answered_its_first_turn(server: Server, connect):
    engines = connect(server.url), RoutedEngines(connect, [server.url])
    for engine in engines:
        server.asked.clear()
        for session, group in (("a", 1), ("b", 0), ("a", 1), ("b", 0)):
            server.group = group
            await engine.generate(ask(session))
        engine.close("a")
        engine.close("never opened")
        server.group = None
        for session in ("a", "a", "b"):
            await engine.generate(ask(session))
        assert [body.get("routed_dp_rank") for body in server.asked] == [None, None, 1, 0, None, None, 0]
    # Several at a time have no group in common.
    await engines[0].generate_batch([ask("b"), ask("c")])
    assert "routed_dp_rank" not in server.asked[-1]


async def test_what_the_caller_gives_up_is_aborted(server: Server, connect):
    server.script = ["hang"]
    engine = connect(server.url)
    task = asyncio.create_task(engine.generate_batch([ask("a"), ask("b")]))
    async with asyncio.timeout(10):
        while not server.asked:
            await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await engine.aclose()
    assert sorted(server.aborted) == sorted(server.rids()[0])
    assert len(server.aborted) == 2


async def test_what_was_answered_is_not_aborted(server: Server, connect):
    engine = connect(server.url)
    result = await engine.generate(ask())
    await engine.aclose()
    assert (result.tokens, result.num_retries, server.aborted) == ([7], 0, [])


@pytest.mark.parametrize("failure", ["cut off", 500, 502, 503])
async def test_a_request_that_nobody_answered_is_sent_again_under_the_same_seed(server: Server, connect, failure):
    server.script = [failure, failure]
    engine = connect(server.url)
    result = await engine.generate(ask())
    await engine.aclose()
    assert (result.tokens, result.num_retries) == ([7], 2)
    assert [body["sampling_params"]["sampling_seed"] for body in server.asked] == [11] * 3
    # An engine may still be at work on the first one, and refuses another request of its id.
    assert len(set(server.rids())) == 3
    assert set(server.aborted) == set(server.rids()[:2] if failure == "cut off" else [])


async def test_a_batch_is_sent_again_as_a_whole(server: Server, connect):
    server.script = ["cut off"]
    results = await connect(server.url).generate_batch([ask("a"), ask("b")])
    assert [result.num_retries for result in results] == [1, 1]
    assert [len(rids) for rids in server.rids()] == [2, 2]


@pytest.mark.parametrize("status", [400, 404, 504])
async def test_a_refusal_is_not_asked_again(server: Server, connect, status: int):
    server.script = [status]
    with pytest.raises(EngineError, match=rf"session s: {status} .*not now"):
        await connect(server.url).generate(ask())
    assert len(server.asked) == 1


async def test_the_last_failure_is_what_is_told(server: Server, connect):
    server.script = [503, 503, "cut off", 502]
    with pytest.raises(EngineError, match="session s: 502"):
        await connect(server.url).generate(ask())
    (nobody,) = free_ports(1)
    with pytest.raises(EngineError, match="ClientConnectorError"):
        await connect(f"http://127.0.0.1:{nobody}").generate(ask())


async def test_the_deadline_is_of_all_attempts_together(monkeypatch: pytest.MonkeyPatch, server: Server, connect):
    monkeypatch.setattr(client, "RETRY_DELAYS_S", (60.0,))
    server.script = [503]
    start = time.monotonic()
    with pytest.raises(EngineError, match=r"no answer within 0\.2 s"):
        await connect(server.url).generate(ask(timeout_s=0.2))
    assert time.monotonic() - start < 5
