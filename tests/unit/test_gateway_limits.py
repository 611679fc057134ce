"""What one client of the gateway can do to others: bodies that grow, texts without end, connections without a word."""

import asyncio
import contextlib
import gzip
import json
import logging
import resource
import socket
import threading
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
from aiohttp import web
from gateway_agents import ANSWER, CHAT, TOOL, ScriptedEngine, play

from slimrl.agent.gateway import listener, server
from slimrl.agent.gateway.aside import Aside
from slimrl.agent.gateway.connection import Connection
from slimrl.agent.gateway.json_body import CHARS_PER_TOKEN
from slimrl.config.schema.agent import GatewayConfig
from slimrl.data.trajectory import Status

QUESTION = {"role": "user", "content": "Compute 34*17+2."}
PATH = "/v1/chat/completions"
CONTEXT = 16_384
MAX_LAG_S = 0.6
"""Threads in Python's own code let the event loop wait for some times 5 ms. On the event loop each of these requests
took from 2 s to minutes."""


@contextlib.asynccontextmanager
async def lag() -> AsyncIterator[list[float]]:
    """How late the event loop wakes up its tasks meanwhile, in seconds.

    By the clock or by this process's CPU time, whichever says less: other processes make it late too.
    """
    late: list[float] = []

    async def watch() -> None:
        while True:
            wall, cpu = time.monotonic(), time.process_time()
            await asyncio.sleep(0.005)
            late.append(min(time.monotonic() - wall, time.process_time() - cpu))

    task = asyncio.create_task(watch())
    yield late
    task.cancel()


def body(**more: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [QUESTION], **more}).encode()


HOSTILE = {
    "one long word": body(messages=[{"role": "user", "content": "a" * (1 << 24)}]),
    "a text that just fits the bound": body(messages=[{"role": "user", "content": "a b" * (CONTEXT * 10)}]),
    "many messages": body(messages=[QUESTION] * 300_000),
    "many numbers": body(messages=[1] * 8_000_000),
    "many keys": b"{" + b",".join(b'"%d":1' % number for number in range(1_000_000)) + b"}",
    "many tools": body(tools=[TOOL] * 2000),
    "a large schema": body(
        tools=[{**TOOL, "function": {**TOOL["function"], "parameters": {"anyOf": [{"type": "string"}] * 30_000}}}]
    ),
}


@pytest.mark.parametrize("kind", HOSTILE)
async def test_a_large_request_holds_up_no_other_one(kind: str):
    content = HOSTILE[kind]

    async def agent(line: Any, connection: Connection) -> None:
        headers = {"authorization": f"Bearer {connection.api_key}"}
        async with httpx.AsyncClient(headers=headers, base_url=connection.url, trust_env=False, timeout=60) as client:
            assert (await client.post(PATH, content=body())).status_code == 200
            # The client of this test shares the loop, so that only what comes after its writing is measured.
            posted = asyncio.create_task(asyncio.to_thread(post, connection, content))
            async with lag() as late:
                answer = await posted
            assert answer.status_code == 400, answer.text
            assert len(answer.text) < 2000
            assert max(late, default=0.0) < MAX_LAG_S
            assert (await client.post(PATH, content=body())).status_code == 200

    trajectory = await play(ScriptedEngine([ANSWER] * 2), agent, max_trajectory_tokens=CONTEXT)
    assert trajectory.metadata["num_turns"] == 2, trajectory.metadata


def post(connection: Connection, content: bytes) -> httpx.Response:
    headers = {"authorization": f"Bearer {connection.api_key}"}
    return httpx.post(connection.url + PATH, content=content, headers=headers, trust_env=False, timeout=60)


async def test_a_text_beyond_the_context_is_refused_before_it_is_tokenized(monkeypatch: pytest.MonkeyPatch):
    async def agent(line: Any, connection: Connection) -> None:
        encoded = []
        monkeypatch.setattr(CHAT.template, "encode", lambda text: encoded.append(text) or [1] * 600)
        for path, field in (
            (PATH, {"messages": [{"role": "user", "content": long}]}),
            ("/v1/responses", {"input": long}),
            ("/v1/messages", {"messages": [{"role": "user", "content": long}], "max_tokens": 5}),
        ):
            answer = await ask(connection, path, {"model": "m", **field})
            assert answer.status_code == 400
            assert f"has room for at most {512 * CHARS_PER_TOKEN}" in answer.json()["error"]["message"]
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert encoded == []
        short = {"model": "m", "messages": [{"role": "user", "content": "x" * 600}]}
        answer = await ask(connection, PATH, short)
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert len(encoded) == 1

    long = "x" * (512 * CHARS_PER_TOKEN)
    trajectory = await play(ScriptedEngine([]), agent)
    assert trajectory.status is Status.failed
    assert "has room for at most" in trajectory.metadata["error"] or "maximum context" in trajectory.metadata["error"]


async def ask(connection: Connection, path: str, value: Any, **headers: str) -> httpx.Response:
    key = {"authorization": f"Bearer {connection.api_key}"}
    content = value if isinstance(value, bytes) else json.dumps(value)
    async with httpx.AsyncClient(headers={**key, **headers}, trust_env=False, timeout=30) as client:
        return await client.post(connection.url + path, content=content)


@pytest.mark.parametrize("key", ["right", "wrong"])
async def test_a_packed_body_is_not_unpacked(key: str):
    bomb = gzip.compress(bytes(1 << 28))

    async def agent(line: Any, connection: Connection) -> None:
        given = {"authorization": "Bearer sk-other"} if key == "wrong" else {}
        async with lag() as late:
            answer = await ask(connection, PATH, bomb, **{"content-encoding": "gzip", **given})
        assert answer.status_code == (415 if key == "right" else 401)
        assert max(late, default=0.0) < MAX_LAG_S
        for packing in ("deflate", "br", "zstd", "x, gzip"):
            assert (await ask(connection, PATH, b"{}", **{"content-encoding": packing})).status_code == 415
        assert (await ask(connection, PATH, body(), **{"content-encoding": "identity"})).status_code == 200

    trajectory = await play(ScriptedEngine([ANSWER]), agent)
    assert trajectory.status is Status.completed, trajectory.metadata


async def test_a_wrong_key_is_answered_before_the_body_and_ends_the_connection():
    async def agent(line: Any, connection: Connection) -> None:
        url = httpx.URL(connection.openai_base_url)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(f"POST {url.path}/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9999\r\n\r\n".encode())
        async with asyncio.timeout(5):
            said = await reader.read()  # to the end: the gateway closes the connection without the body
        assert said.startswith(b"HTTP/1.1 401")
        assert b"connection: close" in said.lower()
        writer.close()
        assert (await ask(connection, PATH, body())).status_code == 200

    trajectory = await play(ScriptedEngine([ANSWER]), agent)
    assert trajectory.status is Status.completed, trajectory.metadata


async def test_idle_connections_take_half_of_the_descriptors_and_make_room(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (80, 80))

    def held(port: int) -> int:
        """Connections that this process holds as a server."""
        mine = psutil.Process().net_connections("tcp")
        return sum(one.laddr.port == port and one.status == psutil.CONN_ESTABLISHED for one in mine)

    async def agent(line: Any, connection: Connection) -> None:
        url = httpx.URL(connection.openai_base_url)
        assert url.port is not None
        flood = [await asyncio.open_connection(url.host, url.port) for _ in range(200)]
        async with asyncio.timeout(10):
            while sum(reader.at_eof() for reader, _ in flood) < 150:
                await asyncio.sleep(0.05)
        assert 30 <= held(url.port) <= 41
        assert (await ask(connection, PATH, body())).status_code == 200
        for _, writer in flood:
            writer.close()

    trajectory = await play(ScriptedEngine([ANSWER]), agent)
    assert trajectory.status is Status.completed, trajectory.metadata
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


async def test_late_headers_and_idle_connections_are_ended(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server, "IDLE_S", 0.5)

    async def agent(line: Any, connection: Connection) -> None:
        url = httpx.URL(connection.openai_base_url)
        for begun in (b"", b"POST / HTTP/1.1\r\nhost: x\r\n"):
            reader, writer = await asyncio.open_connection(url.host, url.port)
            writer.write(begun)
            started = time.monotonic()
            async with asyncio.timeout(10):
                for _ in range(3):
                    await asyncio.sleep(0.1)
                    writer.write(b"x: y\r\n" if begun else b"")
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
            assert time.monotonic() - started > 0.4
            writer.close()
        assert (await ask(connection, PATH, body())).status_code == 200

    trajectory = await play(ScriptedEngine([ANSWER]), agent)
    assert trajectory.status is Status.completed, trajectory.metadata


async def test_a_connection_whose_request_is_under_way_makes_no_room():
    class Runner:
        def __init__(self) -> None:
            self.server = None

    gate = listener.Listener(Runner())  # type: ignore[arg-type]
    closed: list[str] = []

    class Transport:
        def __init__(self, name: str) -> None:
            self.name = name

        def is_closing(self) -> bool:
            return self.name in closed

        def abort(self) -> None:
            closed.append(self.name)

    first, second = Transport("first"), Transport("second")
    gate._idle = {first: None, second: None}  # type: ignore[dict-item]
    with gate.busy(first):  # type: ignore[arg-type]
        assert gate._make_room()
        assert not gate._make_room()
        assert closed == ["second"]
    assert gate._make_room()
    assert closed == ["second", "first"]


@contextlib.asynccontextmanager
async def listening() -> AsyncIterator[tuple[listener.Listener, web.Server, tuple[str, int]]]:
    """A listener that accepts, the server behind it and the address."""

    async def nothing(request: web.BaseRequest) -> web.StreamResponse:
        raise AssertionError

    served = web.Server(nothing)
    gate = listener.Listener(SimpleNamespace(server=served))  # type: ignore[arg-type]
    address = await gate.start("127.0.0.1")
    try:
        yield gate, served, address
    finally:
        await gate.close()
        await served.shutdown(1.0)


async def test_many_connections_are_accepted_in_few_turns_of_the_event_loop():
    async with listening() as (_, served, address):
        # The kernel connects them, and they wait to be accepted.
        clients = [socket.create_connection(address) for _ in range(256)]
        turns = 0
        while len(served.connections) < 256:
            await asyncio.sleep(0)
            turns += 1
            assert turns < 64
        for client in clients:
            client.close()


async def test_no_more_connections_than_may_be_are_accepted_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(listener, "FULL_WAIT_S", 60.0)
    async with listening() as (gate, served, address):
        gate.max_connections = 20
        clients = [socket.create_connection(address) for _ in range(100)]
        most = 0
        for _ in range(20):
            await asyncio.sleep(0)
            most = max(most, len(served.connections))
        assert most == 20
        for client in clients:
            client.close()


async def test_connections_that_have_ended_are_forgotten():
    async with listening() as (gate, served, address):
        for _ in range(8):
            clients = [socket.create_connection(address) for _ in range(50)]
            async with asyncio.timeout(10):
                while len(served.connections) < 50:
                    await asyncio.sleep(0.01)
                for client in clients:
                    client.close()
                while served.connections:
                    await asyncio.sleep(0.01)
        assert len(gate._idle) <= 200


async def test_a_session_begins_only_while_connections_are_accepted(monkeypatch: pytest.MonkeyPatch):
    async def broken(listening: socket.socket) -> None:
        raise RuntimeError("no more of these")

    gateway = server.GatewayServer(GatewayConfig())
    monkeypatch.setattr(asyncio.get_running_loop(), "sock_accept", broken)
    await gateway.start()
    try:
        await asyncio.sleep(0.01)
        with pytest.raises(RuntimeError, match="no more of these"):
            gateway.open(None)  # type: ignore[arg-type]
    finally:
        await gateway.close()


async def test_what_is_no_http_fills_no_log(caplog: pytest.LogCaptureFixture):
    async def agent(line: Any, connection: Connection) -> None:
        url = httpx.URL(connection.openai_base_url)
        for said in (
            b"GET / HTTP/9.9\r\n\r\n",
            b"POST / HTTP/1.1\r\ncontent-length: x\r\n\r\n",
            b"\x16\x03\x01\x02\r\n\r\n",
        ):
            reader, writer = await asyncio.open_connection(url.host, url.port)
            writer.write(said)
            async with asyncio.timeout(10):
                assert (await reader.read()).startswith(b"HTTP/1.0 400")
            writer.close()

    with caplog.at_level(logging.DEBUG, "slimrl"):
        await play(ScriptedEngine([]), agent)
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


async def test_a_computation_whose_client_is_gone_keeps_its_turn_until_it_ends():
    aside, turn, may_end = Aside(), asyncio.Lock(), threading.Event()
    order = []

    def long() -> None:
        may_end.wait(10)
        order.append("first")

    gone = asyncio.create_task(aside.run(long, 1 << 20, turn))
    await asyncio.sleep(0.05)
    gone.cancel()
    next_one = asyncio.create_task(aside.run(lambda: order.append("second"), 1, turn))
    await asyncio.sleep(0.05)
    assert (gone.cancelled(), order) == (True, [])
    may_end.set()
    async with asyncio.timeout(10):
        await next_one
    assert order == ["first", "second"]
    with pytest.raises(ZeroDivisionError):
        await aside.run(lambda: 1 // 0, 1 << 20, turn)
    assert not turn.locked()
