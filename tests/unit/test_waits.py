"""Deadlines of calls that wait for their turn, which is not their own time."""

import asyncio
import time

import pytest

from slimrl.agent.sandbox.admission import Admission
from slimrl.base.threads import in_thread
from slimrl.base.waits import Waits, waiting
from slimrl.rewards.deadline import within


async def waits_and_works(wait_s: float, work_s: float) -> str:
    with waiting():
        await asyncio.sleep(wait_s)
    await asyncio.sleep(work_s)
    return "done"


@pytest.mark.parametrize("waits", [0.6, 0.0])
async def test_only_a_call_s_own_time_counts(waits):
    assert await within(waits_and_works(waits, 0.01), 0.3, "no answer") == "done"
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no answer within 0\.3 s"):
        await within(waits_and_works(waits, 30), 0.3, "no answer")
    assert waits + 0.3 <= time.monotonic() - began + 0.01 < 20


async def test_waits_in_threads_and_tasks_of_a_call_are_its_own():
    def in_a_thread() -> None:
        with waiting():
            time.sleep(0.6)

    async def call() -> str:
        await asyncio.gather(in_thread(in_a_thread), waits_and_works(0.6, 0))
        return "done"

    assert await within(call(), 0.3, "no answer") == "done"
    with pytest.raises(TimeoutError):
        await within(asyncio.sleep(30), 0.1, "no answer")


def test_waits_at_the_same_time_count_once(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("slimrl.base.waits.time.monotonic", lambda: now[0])
    waits = Waits()
    for after_s, number in [(0, 1), (1, 1), (1, -1), (1, -1), (5, 1), (2, -1)]:
        now[0] += after_s
        waits.change(number)
    assert waits.left_s(ends_at=120.0) == pytest.approx(120 - 110 + 3 + 2)


async def test_a_place_in_the_sandbox_is_waited_for_without_counting():
    places = Admission(max_running=1, max_waiting=1, wait_s=60.0)

    async def run() -> str:
        async with places.place():
            return "done"

    await places.enter()
    asyncio.get_running_loop().call_later(0.6, places.leave)
    assert await within(run(), 0.3, "no reward") == "done"
