"""Slots for trajectories: never more than the limit begin, whatever changes it, and none is lost."""

import asyncio
import random

import pytest

from slimrl.rollout.slots import Slots


async def take(slots: Slots, order: list[int], number: int, go_on: asyncio.Event) -> None:
    async with slots:
        order.append(number)
        await go_on.wait()


async def begun(slots: Slots, count: int) -> tuple[list[int], list[asyncio.Task[None]], asyncio.Event]:
    order, go_on = [], asyncio.Event()
    tasks = [asyncio.create_task(take(slots, order, number, go_on)) for number in range(count)]
    await asyncio.sleep(0)
    return order, tasks, go_on


def test_slots_are_given_in_the_order_in_which_they_are_asked_for():
    async def play() -> list[int]:
        slots = Slots(2)
        order, tasks, go_on = await begun(slots, 5)
        assert (order, slots.taken, slots.locked()) == ([0, 1], 2, True)
        go_on.set()
        await asyncio.gather(*tasks)
        assert (slots.taken, slots.locked()) == (0, False)
        assert (slots.take_num_ended(), slots.take_num_ended()) == (5, 0)
        return order

    assert asyncio.run(play()) == [0, 1, 2, 3, 4]


def test_a_higher_limit_lets_others_begin_and_a_lower_one_waits_until_enough_have_ended():
    async def play() -> None:
        slots = Slots(1)
        order, tasks, _ = await begun(slots, 6)
        slots.limit = 4
        await asyncio.sleep(0)
        assert (order, slots.taken) == ([0, 1, 2, 3], 4)
        slots.limit = 2
        for ended in range(2):
            tasks[ended].cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert (slots.taken, len(order)) == (3 - ended, 4)
        tasks[2].cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert (order, slots.taken) == ([0, 1, 2, 3, 4], 2)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert slots.taken == 0

    asyncio.run(play())


def test_one_that_is_cancelled_just_after_it_got_a_slot_hands_it_on():
    async def play() -> list[int]:
        slots = Slots(1)
        order, tasks, go_on = await begun(slots, 3)
        slots.limit = 2
        tasks[1].cancel()
        go_on.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert slots.taken == 0
        return order

    assert asyncio.run(play()) == [0, 2]


@pytest.mark.parametrize("seed", range(20))
def test_under_random_ends_cancels_and_limits_no_slot_is_lost_and_none_is_taken_twice(seed):
    rng = random.Random(seed)

    async def play() -> None:
        slots, running = Slots(3), set[int]()

        async def one(number: int) -> None:
            async with slots:
                assert len(running) < most
                running.add(number)
                try:
                    await asyncio.sleep(rng.random() * 0.002)
                finally:
                    running.discard(number)

        most, tasks = 3, []
        for number in range(200):
            tasks.append(asyncio.create_task(one(number)))
            if rng.random() < 0.2:
                rng.choice(tasks).cancel()
            if rng.random() < 0.1:
                limit = rng.randint(1, 8)
                # Those that have a slot keep it.
                most = max(limit, slots.taken)
                slots.limit = limit
            if rng.random() < 0.5:
                await asyncio.sleep(rng.random() * 0.001)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(result) for result in results} <= {type(None), asyncio.CancelledError}
        assert (slots.taken, slots.locked(), running) == (0, False, set())

    asyncio.run(play())
