"""Concurrency that adapts to full caches: its rules under any observations, against a made-up cache, and over HTTP."""

import asyncio
import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from slimrl.config.schema.rollout import RolloutConfig
from slimrl.rollout import pressure
from slimrl.rollout.adaptive_concurrency import CUT, CUT_USAGE, GROW_USAGE, STEPS, AdaptiveConcurrency
from slimrl.rollout.pressure import CachePressure

OBSERVATION = st.fixed_dictionaries(
    {
        "running": st.integers(0, 2000),
        "ended": st.integers(0, 500),
        "retractions": st.integers(0, 3),
        "usage": st.floats(0, 1),
    }
)
MOST = st.integers(1, 1000)


@given(most=MOST, least=st.integers(1, 8), observations=st.lists(OBSERVATION, max_size=50))
def test_the_limit_stays_within_its_bounds_and_moves_only_as_the_caches_say(most, least, observations):
    state = AdaptiveConcurrency(most=max(most, least), least=least)
    for observation in observations:
        before, after = state.limit, state.observe(**observation)
        assert least <= after <= max(most, least)
        if observation["retractions"] or observation["usage"] >= CUT_USAGE:
            assert after <= before
        elif observation["usage"] >= GROW_USAGE or observation["running"] < before:
            assert after == before
        else:
            assert before <= after <= before + max(observation["ended"], 1)


@given(most=MOST)
def test_without_pressure_all_may_run_when_twice_the_first_have_ended(most):
    state = AdaptiveConcurrency(most=most, least=1)
    for _ in range(2):
        state.observe(running=state.limit, ended=state.limit + 1, retractions=0, usage=0.5)
    assert state.limit == most


@given(most=st.integers(10, 1000), running=st.lists(st.integers(0, 2000), min_size=1, max_size=20))
def test_a_cut_is_not_repeated_before_as_few_run_as_it_said(most, running):
    state = AdaptiveConcurrency(most=most, least=1)
    while state.limit < most:
        state.observe(running=most, ended=most, retractions=0, usage=0.0)
    cut = state.observe(running=most, ended=0, retractions=1, usage=1.0)
    assert cut == math.floor(CUT * most)
    for count in running:
        if count <= cut:
            break
        assert state.observe(running=count, ended=3, retractions=1, usage=1.0) == cut


def test_the_long_trajectories_at_the_end_of_a_step_cut_nothing():
    state = AdaptiveConcurrency(most=400, least=1)
    assert [state.observe(running=running, ended=0, retractions=5, usage=1.0) for running in (0, 3, 49)] == [100] * 3
    assert state.observe(running=50, ended=0, retractions=5, usage=1.0) == 40


def test_after_a_cut_the_limit_rises_by_a_fixed_number_within_the_time_of_a_trajectory():
    state = AdaptiveConcurrency(most=640, least=1)
    state.observe(running=100, ended=0, retractions=1, usage=0.5)  # of the 160 at the start
    limits = [state.limit]
    for _ in range(5):
        # As many end in ten observations as run.
        for _ in range(10):
            state.observe(running=state.limit, ended=state.limit // 10, retractions=0, usage=0.5)
        limits.append(state.limit)
    rises = [after - before for before, after in pairwise(limits)]
    assert limits[0] == 80
    assert all(640 / STEPS * 0.8 <= rise <= 640 / STEPS for rise in rises), limits


def play(state: AdaptiveConcurrency | None, *, most: int, steps: int = 4000) -> tuple[list[int], int, int]:
    """Trajectories that grow by a token a step up to LENGTH, in a cache of ROOM tokens that takes the newest ones away.

    Returns:
        The limit after each step, and how many trajectories ended and were taken away.
    """
    rng, ages, limits, ended_in_all, retracted = random.Random(0), [], [], 0, 0
    for _ in range(steps):
        ended = sum(age >= LENGTH for age in ages)
        ages = [age + 1 for age in ages if age < LENGTH]
        limit = most if state is None else state.limit
        ages += [rng.randrange(5) for _ in range(limit - len(ages))]
        ages.sort(reverse=True)
        lost = 0
        while sum(ages) > ROOM:
            ages.pop()
            lost += 1
        ended_in_all, retracted = ended_in_all + ended, retracted + lost
        if state is not None:
            state.observe(running=len(ages), ended=ended, retractions=lost, usage=sum(ages) / ROOM)
        limits.append(limit)
    return limits, ended_in_all, retracted


LENGTH, ROOM = 100, 12_000


def test_around_the_room_that_there_is_the_limit_goes_up_and_down_and_few_trajectories_are_retracted():
    fixed, adapted = play(None, most=512), play(AdaptiveConcurrency(most=512, least=1), most=512)
    # Evenly aged, 240 of them fill it.
    assert min(adapted[0][1000:]) >= 80
    assert max(adapted[0][1000:]) <= 300
    assert adapted[1] > 0.7 * fixed[1]
    assert adapted[2] < 0.01 * fixed[2]


def states(retractions: int, usage: float) -> list[dict[str, float]]:
    return [{"slimrl_retractions": retractions, "slimrl_token_usage": usage, "slimrl_running_requests": 3}]


def made(*, adaptive: bool = True, most: int = 100, engines: int = 2) -> CachePressure:
    rollout = RolloutConfig(
        num_engines=engines, max_concurrency_per_engine=most // engines, adaptive_concurrency=adaptive
    )
    return CachePressure(rollout, lambda: ["a", "b"][:engines])


def test_retractions_are_counted_from_answer_to_answer_and_from_0_for_a_new_engine():
    watched = made(adaptive=False)
    assert watched.take() == {}
    watched.observe({"a": states(5, 0.5), "b": states(0, 0.7)})
    watched.observe({"a": [], "b": states(2, 0.1)})
    assert watched.take() == {"rollout/retractions": 7, "rollout/token_usage_max": 0.7}
    watched.observe({"a": states(6, 0.2), "b": states(1, 0.1)})
    assert watched.take() == {"rollout/retractions": 2, "rollout/token_usage_max": 0.2}
    watched.observe({"a": [], "b": []})
    assert watched.take() == {}
    # Two schedulers of one engine.
    watched.observe({"a": states(6, 0.2) + states(3, 0.9)})
    assert watched.take() == {"rollout/retractions": 3, "rollout/token_usage_max": 0.9}


def test_slots_in_use_follow_the_limit_and_later_ones_begin_with_it():
    async def play() -> None:
        watched = made()
        first = watched.slots()
        assert first.limit == 25
        for _ in range(25):
            await first.__aenter__()
        for _ in range(4):
            await first.__aexit__(None, None, None)
            await first.__aenter__()
        watched.observe({"a": [], "b": []})
        assert first.limit == 25
        watched.observe({"a": states(0, 0.5)})
        assert (first.limit, watched.slots().limit, watched.take()["rollout/concurrency_limit"]) == (29, 29, 29)
        watched.observe({"a": states(1, 0.5)})
        assert first.limit == 20

    asyncio.run(play())


def test_slots_are_there_for_the_most_engines_that_a_run_may_have():
    rollout = RolloutConfig(num_engines=2, max_engines=3, max_concurrency_per_engine=50)
    assert CachePressure(rollout, lambda: []).slots().limit == 150
    adaptive = replace(rollout, adaptive_concurrency=True)
    # A quarter of the most.
    assert CachePressure(adaptive, lambda: []).slots().limit == 37


def test_without_the_setting_all_slots_are_there_whatever_the_caches():
    watched = made(adaptive=False)
    slots = watched.slots()
    watched.observe({"a": states(100, 1.0)})
    assert slots.limit == watched.slots().limit == 100
    assert "rollout/concurrency_limit" not in watched.take()


@pytest.mark.parametrize("broken", ["gone", "silent", "error", "text"])
def test_an_engine_that_does_not_answer_is_left_out_and_the_others_count(broken, monkeypatch):
    monkeypatch.setattr(pressure, "POLL_S", 0.01)
    monkeypatch.setattr(pressure, "TIMEOUT_S", 0.1)

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"internal_states": states(3, 0.25)})

    async def fail(request: web.Request) -> web.Response:
        if broken == "silent":
            await asyncio.sleep(30)
        return web.Response(status=500 if broken == "error" else 200, text="busy")

    async def play() -> dict[str, float]:
        application = web.Application()
        application.router.add_get("/good/server_info", answer)
        application.router.add_get("/bad/server_info", fail)
        runner = web.AppRunner(application, shutdown_timeout=0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        bad = "http://127.0.0.1:9" if broken == "gone" else f"{url}/bad"
        watched = CachePressure(RolloutConfig(), lambda: [bad, f"{url}/good"])
        watching = asyncio.create_task(watched.watch())
        try:
            await asyncio.sleep(0.1)
            assert watched.take() == {}, "nothing runs"
            slots = watched.slots()
            async with asyncio.timeout(5), slots:
                while not (metrics := watched.take()):
                    await asyncio.sleep(0.01)
                assert not watching.done()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await runner.cleanup()
        return metrics

    assert asyncio.run(play()) == {"rollout/retractions": 3, "rollout/token_usage_max": 0.25}
