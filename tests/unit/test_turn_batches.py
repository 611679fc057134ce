"""Turns that begin at the same moment share a request to their engine, and each of them ends by itself."""

import asyncio
import base64
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import numpy as np
import pytest
from engine_server import EngineServer, serving

from slimrl.data.engine import EngineError, EngineUnreachable, GenerateRequest
from slimrl.engines import turn_batches
from slimrl.engines.client import SglangEngine, _events
from slimrl.engines.routing import RoutedEngines


@pytest.fixture
async def server() -> AsyncIterator[EngineServer]:
    there = EngineServer()
    async with serving(there):
        yield there


@pytest.fixture
async def connect(server: EngineServer) -> AsyncIterator[Callable[..., SglangEngine]]:
    engines = []

    def begin(**how) -> SglangEngine:
        engines.append(SglangEngine(server.url, **how))
        return engines[-1]

    yield begin
    for engine in engines:
        await engine.aclose()


def ask(token: int, timeout_s: float = 20.0, stop: tuple[int, ...] = ()) -> GenerateRequest:
    return GenerateRequest(
        session_id=f"s{token}", input_ids=[token, 2], temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=token,
        stop_token_ids=stop, timeout_s=timeout_s, seed=token,
    )  # fmt: skip


def sizes(server: EngineServer) -> list[int]:
    """Size of the request that each turn was in; 1 for one of its own."""
    return [body.get("together", 1) for body in server.bodies]


async def test_each_turn_of_a_request_has_its_own_settings_and_answer(server, connect):
    engine = connect()
    results = await asyncio.gather(*(engine.generate(ask(token, stop=(token + 50,))) for token in (5, 6, 7)))
    assert [result.tokens for result in results] == [[5], [6], [7]]
    assert [result.num_retries for result in results] == [0, 0, 0]
    assert sizes(server) == [3, 3, 3]
    sampled = [
        (body["sampling_params"]["sampling_seed"], body["sampling_params"]["max_new_tokens"]) for body in server.bodies
    ]
    assert sampled == [(5, 5), (6, 6), (7, 7)]
    assert [body["sampling_params"]["stop_token_ids"] for body in server.bodies] == [[55], [56], [57]]
    await engine.generate(ask(8))
    assert sizes(server) == [3, 3, 3, 1]
    assert server.aborted == []


async def test_a_request_holds_so_many_turns_and_those_of_a_group_of_ranks_alone(server, connect, monkeypatch):
    monkeypatch.setattr(turn_batches, "MOST_TURNS", 4)
    engine = connect()
    for token, group in ((1, 0), (2, 1), (3, 1)):
        server.group = group
        await engine.generate(ask(token))
    server.bodies.clear()
    await asyncio.gather(*(engine.generate(ask(token)) for token in (1, 2, 3, *range(10, 19))))
    of_group = {body["rid"]: (body.get("routed_dp_rank"), body["input_ids"][0]) for body in server.bodies}
    assert {token for group, token in of_group.values() if group == 1} == {2, 3}
    assert [token for group, token in of_group.values() if group == 0] == [1]
    assert sorted(sizes(server)) == [1, 1, 2, 2, *[4] * 8]


async def test_a_turn_that_is_cancelled_or_late_is_aborted_and_the_others_are_answered(server, connect):
    server.slow = 0.5
    engines = RoutedEngines(lambda url: connect(), [server.url])
    cancelled, late, stays = (
        asyncio.create_task(engines.generate(request)) for request in (ask(1), ask(2, timeout_s=0.1), ask(3))
    )
    await server.asked(3)
    cancelled.cancel()
    with pytest.raises(EngineError, match=r"session s2: no answer within 0\.1 s"):
        await late
    assert (await stays).tokens == [3]
    await engines.aclose()
    assert sorted(server.aborted) == sorted(server.rids[:2])


async def test_a_request_that_nobody_waits_for_ends(server, connect):
    server.action = "hang"
    engine = connect()
    tasks = [asyncio.create_task(engine.generate(ask(token))) for token in (1, 2)]
    await server.asked(2)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await asyncio.gather(*engine._batches._streams, return_exceptions=True)
    assert not engine._batches._streams
    await engine.aclose()
    assert sorted(server.aborted) == sorted(server.rids)


async def test_turns_that_run_when_the_client_closes_end(server, connect):
    server.action = "hang"
    engine = connect()
    tasks = [asyncio.create_task(engine.generate(ask(token))) for token in (1, 2)]
    await server.asked(2)
    async with asyncio.timeout(5):
        await engine.aclose()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert all(task.cancelled() for task in tasks)
    assert sizes(server) == [2, 2]


async def test_turns_that_ask_for_experts_from_different_tokens_do_not_share_a_request(server, connect):
    server.experts = base64.b64encode(np.zeros((2, 1, 1), np.int32)).decode()
    engine = connect(routed_experts_shape=(1, 1))
    requests = [replace(ask(token), experts_from=start) for token, start in ((5, 0), (6, 0), (7, 1), (8, 1), (9, 1))]
    await asyncio.gather(*(engine.generate(request) for request in requests), return_exceptions=True)
    assert {(body["input_ids"][0], body["routed_experts_start_len"]) for body in server.bodies} >= {(5, 0), (7, 1)}
    assert sizes(server)[:5] == [2, 2, 3, 3, 3]


async def test_what_the_engine_refuses_together_is_asked_for_one_by_one(server, connect):
    server.script = [400]
    engine = connect()
    results = await asyncio.gather(*(engine.generate(ask(token)) for token in (5, 6)))
    assert [(result.tokens, result.num_retries) for result in results] == [([5], 1), ([6], 1)]
    assert sizes(server) == [2, 2, 1, 1]
    assert server.bodies[2]["sampling_params"]["sampling_seed"] == 5


async def test_a_turn_that_the_engine_refuses_fails_as_it_would_by_itself(server, connect):
    server.refused = 6
    engine = connect()
    first, refused, last = await asyncio.gather(
        *(engine.generate(ask(token)) for token in (5, 6, 7)), return_exceptions=True
    )
    assert (first.tokens, last.tokens) == ([5], [7])
    assert isinstance(refused, EngineError)
    assert "400" in str(refused)
    assert sizes(server) == [3, 3, 3, 1]


@pytest.mark.parametrize("action", ["cut off", 503])
async def test_where_the_connection_breaks_all_turns_fail(server, connect, action):
    server.script = [action]
    engine = connect()
    failed = await asyncio.gather(*(engine.generate(ask(token)) for token in (5, 6)), return_exceptions=True)
    assert [type(error) for error in failed] == [EngineUnreachable] * 2


@pytest.mark.parametrize("size", range(1, 9))
async def test_events_are_read_wherever_the_network_divides_them(size: int):
    sent = b'data: {"a": 1}\n\ndata: {"b": [2]}\n\ndata: [DONE]\n\ndata: {"c": 3}\n\n'

    class Content:
        async def iter_any(self):
            for start in range(0, len(sent), size):
                yield sent[start : start + size]

    assert [event async for event in _events(Content())] == [b'{"a": 1}', b'{"b": [2]}']
