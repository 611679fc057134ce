"""Requests to an engine that answers late, not at all or at the second time of asking: a server in this process."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import pytest
from engine_server import EngineServer, serving

from slimrl.data.engine import EngineError, GenerateRequest
from slimrl.engines import retries
from slimrl.engines.client import SglangEngine
from slimrl.engines.lockstep import LockstepEngine
from slimrl.engines.routing import RoutedEngines


@pytest.fixture
async def server() -> AsyncIterator[EngineServer]:
    there = EngineServer(7)
    async with serving(there):
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
    monkeypatch.setattr(retries, "RETRY_DELAYS_S", (0.01, 0.02, 0.03))


@pytest.fixture
async def routed(connect) -> AsyncIterator[Callable[[str], RoutedEngines]]:
    """The only engine that there is, with retries."""
    made = []

    def begin(url: str) -> RoutedEngines:
        made.append(RoutedEngines(connect, [url]))
        return made[-1]

    yield begin
    for engines in made:
        await engines.aclose()


def ask(session: str = "s", timeout_s: float = 20.0) -> GenerateRequest:
    return GenerateRequest(
        session_id=session, input_ids=[1, 2], temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=4,
        stop_token_ids=(), timeout_s=timeout_s, seed=11,
    )  # fmt: skip


async def test_what_is_not_answered_by_the_deadline_is_aborted_and_not_asked_again(server: EngineServer, routed):
    server.script = ["hang"]
    engine = routed(server.url)
    with pytest.raises(EngineError, match=r"session late: no answer within 0\.1 s"):
        await engine.generate(ask("late", timeout_s=0.1))
    await engine.aclose()
    assert server.aborted == server.rids
    assert len(server.bodies) == 1


async def test_a_session_keeps_to_the_group_of_ranks_that_answered_its_first_turn(server: EngineServer, connect):
    engines = connect(server.url), RoutedEngines(connect, [server.url])
    for engine in engines:
        server.bodies.clear()
        for session, group in (("a", 1), ("b", 0), ("a", 1), ("b", 0)):
            server.group = group
            await engine.generate(ask(session))
        engine.close("a")
        engine.close("never opened")
        server.group = None
        for session in ("a", "a", "b"):
            await engine.generate(ask(session))
        assert [body.get("routed_dp_rank") for body in server.bodies] == [None, None, 1, 0, None, None, 0]
    # Several at a time have no group in common.
    await engines[0].generate_batch([ask("b"), ask("c")])
    assert "routed_dp_rank" not in server.bodies[-1]


async def test_what_the_caller_gives_up_is_aborted(server: EngineServer, connect):
    server.script = ["hang"]
    engine = connect(server.url)
    task = asyncio.create_task(engine.generate_batch([ask("a"), ask("b")]))
    await server.asked(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await engine.aclose()
    assert sorted(server.aborted) == sorted(server.rids[0])
    assert len(server.aborted) == 2


async def test_what_was_answered_is_not_aborted(server: EngineServer, connect):
    engine = connect(server.url)
    result = await engine.generate(ask())
    await engine.aclose()
    assert (result.tokens, result.num_retries, server.aborted) == ([7], 0, [])


@pytest.mark.parametrize("failure", ["cut off", 500, 502, 503])
async def test_a_request_that_nobody_answered_is_sent_again_under_the_same_seed(server: EngineServer, routed, failure):
    server.script = [failure, failure]
    engine = routed(server.url)
    result = await engine.generate(ask())
    await engine.aclose()
    assert (result.tokens, result.num_retries) == ([7], 2)
    assert [body["sampling_params"]["sampling_seed"] for body in server.bodies] == [11] * 3
    # An engine may still be at work on the first one, and refuses another request of its id.
    assert len(set(server.rids)) == 3
    assert set(server.aborted) == set(server.rids[:2] if failure == "cut off" else [])


async def test_a_round_in_lockstep_is_sent_again_as_a_whole_before_its_deadline(server: EngineServer, connect):
    server.script = ["cut off"]
    engine = LockstepEngine([connect(server.url)])
    engine.open(["a", "b"], at_once=2)
    results = await asyncio.gather(engine.generate(ask("a")), engine.generate(ask("b")))
    assert [result.num_retries for result in results] == [1, 1]
    assert [len(rids) for rids in server.rids] == [2, 2]
    server.script = ["hang"]
    late = asyncio.gather(*(engine.generate(ask(name, 0.1)) for name in ("a", "b")), return_exceptions=True)
    assert [str(error) for error in await late] == ["session a: no answer within 0.1 s"] * 2
    await engine.aclose()
    assert sorted(server.aborted) == sorted(server.rids[0] + server.rids[2])


@pytest.mark.parametrize("status", [400, 404, 504])
async def test_a_refusal_is_not_asked_again(server: EngineServer, routed, status: int):
    server.script = [status]
    with pytest.raises(EngineError, match=rf"session s: {status} .*not now"):
        await routed(server.url).generate(ask())
    assert len(server.bodies) == 1


async def test_the_last_failure_is_what_is_told(server: EngineServer, routed, monkeypatch: pytest.MonkeyPatch):
    server.script = [503, 503, "cut off", 502]
    with pytest.raises(EngineError, match="session s: 502"):
        await routed(server.url).generate(ask())
    monkeypatch.setattr(retries, "RETRY_DELAYS_S", (60.0,))
    server.script = [503]
    start = time.monotonic()
    with pytest.raises(EngineError, match=r"session s: no answer within 0\.2 s: http://.*503 .*not now"):
        await routed(server.url).generate(ask(timeout_s=0.2))
    assert time.monotonic() - start < 5
