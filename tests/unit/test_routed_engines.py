"""Several engines as one, by their real clients."""

import asyncio
import pickle
import threading
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from engine_server import EngineServer, serving

from slimrl.data.engine import EngineError, GenerateRequest, ScoreRequest
from slimrl.engines import retries, routing
from slimrl.engines.client import SglangEngine
from slimrl.engines.routing import RoutedEngines
from slimrl.engines.servers.ports import free_ports

LOGGED = ("slimrl.engines.routing", "WARNING")


@pytest.fixture
async def servers() -> AsyncIterator[list[EngineServer]]:
    made = [EngineServer(7), EngineServer(8)]
    async with serving(*made):
        yield made


@pytest.fixture
async def engines(servers: list[EngineServer]) -> AsyncIterator[RoutedEngines]:
    made = RoutedEngines(SglangEngine)
    made.use([server.url for server in servers])
    yield made
    await made.aclose()


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "RETRY_DELAYS_S", (0.01, 0.02, 0.03))


def ask(session: str = "s", timeout_s: float = 20.0) -> GenerateRequest:
    return GenerateRequest(
        session_id=session, input_ids=[1, 2], temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=4,
        stop_token_ids=(), timeout_s=timeout_s, seed=11,
    )  # fmt: skip


async def first_of(engines: RoutedEngines, servers: list[EngineServer]) -> tuple[EngineServer, EngineServer]:
    """The server that session s is on, and the other."""
    token = (await engines.generate(ask())).tokens[0]
    return (servers[0], servers[1]) if token == servers[0].token else (servers[1], servers[0])


async def test_what_runs_on_an_engine_that_left_is_aborted_there_and_goes_on_elsewhere(engines, servers):
    here, there = await first_of(engines, servers)
    here.action = "hang"
    asked = [asyncio.create_task(engines.generate(ask())) for _ in range(2)]
    await here.asked(3)
    # From another thread, as the one that watches the engines.
    await asyncio.to_thread(engines.use, [there.url])
    async with asyncio.timeout(10):
        results = await asyncio.gather(*asked)
    assert [(result.tokens, result.num_retries) for result in results] == [([there.token], 1)] * 2
    assert engines.live == (there.url,)
    here.action = ""
    engines.use([here.url, there.url])
    assert (await engines.generate(ask())).tokens == [there.token]
    await engines.aclose()
    assert sorted(here.aborted) == sorted(here.rids[1:])
    assert there.aborted == []


async def test_without_an_engine_requests_wait_for_one_until_their_deadline(engines, servers):
    engines.use([])
    waiting = asyncio.create_task(engines.generate(ask()))
    with pytest.raises(EngineError, match=r"session late: no engine became available within 0\.1 s"):
        await engines.generate(ask("late", timeout_s=0.1))
    assert not waiting.done()
    threading.Timer(0.05, engines.use, [[servers[1].url]]).start()
    async with asyncio.timeout(10):
        assert (await waiting).tokens == [servers[1].token]
    # Those that run when the last one leaves wait too.
    servers[1].action = "hang"
    running = asyncio.create_task(engines.generate(ask()))
    await servers[1].asked(2)
    engines.use([])
    await asyncio.sleep(0.05)
    assert not running.done()
    engines.use([servers[0].url])
    async with asyncio.timeout(10):
        assert (await running).tokens == [servers[0].token]


@pytest.mark.parametrize("action", ["cut off", 500, 503])
async def test_what_breaks_off_is_sent_to_another_engine_at_once_and_this_one_is_avoided(
    engines, servers, action, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(retries, "RETRY_DELAYS_S", (60.0,))
    here, there = await first_of(engines, servers)
    here.action = action
    async with asyncio.timeout(10):
        result = await engines.generate(ask())
    assert (result.tokens, result.num_retries) == ([there.token], 1)
    for session in ("t", "u", "s"):
        assert (await engines.generate(ask(session))).tokens == [there.token]
    assert len(here.rids) == 2


async def test_an_engine_that_ends_is_logged_once_however_many_requests_it_had(
    engines, servers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(routing, "AVOID_S", 0.5)
    here, there = await first_of(engines, servers)
    here.action = "cut off"
    for times in (1, 2):
        async with asyncio.timeout(10):
            results = await asyncio.gather(*(engines.generate(ask(f"{times} {number}")) for number in range(4)))
        assert [(result.tokens, result.num_retries) for result in results] == [([there.token], 1)] * 4
        assert len(here.rids) == 1 + 4 * times
        warnings = [one.getMessage() for one in caplog.records if (one.name, one.levelname) == LOGGED]
        assert len(warnings) == times, warnings
        assert warnings[-1].startswith(here.url)
        await asyncio.sleep(0.7)


@pytest.mark.parametrize("by", ["time", "use"])
async def test_an_engine_that_was_gone_is_asked_again_after_a_while_or_with_the_next_use(
    engines, servers, by, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(routing, "AVOID_S", 0.2 if by == "time" else 60.0)
    here, there = await first_of(engines, servers)
    here.action = 503
    assert (await engines.generate(ask())).tokens == [there.token]
    here.action, there.action = "", "hang"
    busy = asyncio.create_task(engines.generate(ask("busy")))
    await there.asked(2)
    if by == "use":
        engines.use(engines.live)
    await asyncio.sleep(0.3)
    # Another prompt than that of the session, at the engine with nothing to do.
    assert (await engines.generate(replace(ask("t"), input_ids=[5]))).tokens == [here.token]
    busy.cancel()


async def test_the_only_engine_is_asked_again_after_a_delay(engines, servers, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(retries, "RETRY_DELAYS_S", (0.3, 60.0))
    server = servers[0]
    engines.use([server.url])
    server.action = 503
    asked = asyncio.create_task(engines.generate(ask()))
    await server.asked(1)
    await asyncio.sleep(0.05)
    server.action = ""
    async with asyncio.timeout(10):
        assert (await asked).num_retries == 1


async def test_a_request_that_fails_everywhere_fails_with_the_last_cause_and_one_that_is_refused_is_not_sent_again(
    engines, servers, monkeypatch: pytest.MonkeyPatch
):
    for server in servers:
        server.action = 503
    with pytest.raises(EngineError, match=r"http://.*, session s: 503 .*not now"):
        await engines.generate(ask())
    assert sum(len(server.rids) for server in servers) == 4
    for server in servers:
        server.action = 400
    with pytest.raises(EngineError, match="400"):
        await engines.generate(ask())
    assert sum(len(server.rids) for server in servers) == 5
    (nobody,) = free_ports(1)
    gone = RoutedEngines(SglangEngine, [f"http://127.0.0.1:{nobody}"])
    monkeypatch.setattr(retries, "RETRY_DELAYS_S", (0.01, 0.01, 1.0))
    start = asyncio.get_running_loop().time()
    with pytest.raises(EngineError, match="ClientConnectorError"):
        await gone.generate(ask(timeout_s=3.5))
    assert asyncio.get_running_loop().time() - start > 1.5, "it may come back"
    await gone.aclose()


async def test_a_request_waits_for_engines_of_which_none_is_there_and_has_not_failed_by_that(engines, servers):
    (nobody,) = free_ports(1)
    engines.use([f"http://127.0.0.1:{nobody}"])
    asked = asyncio.create_task(engines.generate(ask()))
    await asyncio.sleep(0.3)
    assert not asked.done()
    engines.use([servers[0].url])
    assert (await asked).tokens == [7]


async def test_the_deadline_is_of_all_attempts_and_what_the_caller_gives_up_is_aborted(engines, servers):
    here, there = await first_of(engines, servers)
    here.action = there.action = "hang"
    start = asyncio.get_running_loop().time()
    asked = asyncio.create_task(engines.generate(ask(timeout_s=0.5)))
    given_up = asyncio.create_task(engines.generate(ask()))
    await here.asked(3)
    await asyncio.sleep(0.25)
    given_up.cancel()
    engines.use([there.url])
    with pytest.raises(EngineError, match="no answer within"):
        await asked
    assert 0.4 < asyncio.get_running_loop().time() - start < 5
    with pytest.raises(asyncio.CancelledError):
        await given_up
    await engines.aclose()
    assert sorted(here.aborted + there.aborted) == sorted(here.rids[1:] + there.rids)
    assert not any(engines._choice.loads.values())


async def test_a_copy_in_another_process_has_the_engines_of_its_moment_and_follows_by_what_is_told(engines, servers):
    told: list[tuple] = []
    engines.follow(lambda *given: told.append(given))
    engines.use([servers[1].url])
    copy = pickle.loads(pickle.dumps(engines))
    assert told == [()]
    assert engines.in_use == ((servers[1].url,), None)
    assert copy.live == (servers[1].url,)
    assert (await copy.generate(ask())).tokens == [servers[1].token]
    await copy.aclose()
    # The event loop may be gone, and the engines still change.
    engines.use([servers[0].url])
    await engines.aclose()
    engines.use([])


async def test_evaluations_go_to_the_engines_that_are_set_aside_and_to_no_others(engines, servers):
    engines.use([servers[0].url], [servers[1].url])
    asked = [engines.generate(ask(f"{kind}{number}/0")) for number in range(4) for kind in ("eval_", "step_")]
    tokens = [result.tokens[0] for result in await asyncio.gather(*asked)]
    assert tokens == [servers[1].token, servers[0].token] * 4
    engines.use([servers[0].url], [])
    with pytest.raises(EngineError, match="no engine became available"):
        await engines.generate(ask("eval_9/0", timeout_s=0.2))
    engines.use([servers[0].url])
    assert (await engines.generate(ask("eval_9/0"))).tokens == [servers[0].token]
    await engines.aclose()


async def test_scores_move_on_from_an_engine_that_leaves_and_wait_where_none_is_there(engines, servers):
    request = ScoreRequest(session_id="score/0", tokens=[5, 6, 7], start=1, timeout_s=20.0)
    for server in servers:
        server.action = "hang"
    asked = asyncio.create_task(engines.score(request))
    async with asyncio.timeout(10):
        while not any(server.bodies for server in servers):
            await asyncio.sleep(0.01)
    here, there = servers if servers[0].bodies else servers[::-1]
    there.action = ""
    engines.use([there.url])
    async with asyncio.timeout(10):
        assert (await asked).tolist() == [-6.0, -7.0]
    engines.use([])
    waiting = asyncio.create_task(engines.score(request))
    with pytest.raises(EngineError, match=r"session score/0: no engine became available within 0\.1 s"):
        await engines.score(replace(request, timeout_s=0.1))
    assert not waiting.done()
    # One that has ended and was not missed yet, which is then replaced.
    (nobody,) = free_ports(1)
    engines.use([f"http://127.0.0.1:{nobody}"])
    await asyncio.sleep(0.1)
    assert not waiting.done()
    engines.use([there.url])
    async with asyncio.timeout(10):
        assert (await waiting).tolist() == [-6.0, -7.0]
    await engines.aclose()
    assert here.aborted == here.rids
