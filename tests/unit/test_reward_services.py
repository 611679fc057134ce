"""Rewards that are started before the first rollout and closed at the end."""

import asyncio
import sys
import time
from contextlib import suppress

import pytest

from slimrl.rewards.parts import Part
from slimrl.rewards.services import NotStarted, RewardServices


class Service:
    """Writes down what happens to it."""

    def __init__(self, name, journal, *, start=None, close=None):
        self.name, self.journal, self.failures = name, journal, {"start": start, "close": close}

    async def _do(self, what):
        self.journal.append(f"{what} {self.name}")
        if isinstance(self.failures[what], Exception):
            raise self.failures[what]
        if self.failures[what] == "hangs":
            await asyncio.sleep(60)

    async def start(self):
        await self._do("start")

    async def close(self):
        await self._do("close")


def services(*functions, timeout_s=5.0):
    parts = [Part(name=f"p{number}", function=one, path="task:s") for number, one in enumerate(functions)]
    return RewardServices(parts, timeout_s=timeout_s)


async def test_they_start_in_order_and_close_in_reverse_once():
    journal = []
    started = services(Service("a", journal), lambda *_: 1.0, Service("b", journal))
    await started.start()
    await started.close()
    await started.close()
    assert journal == ["start a", "start b", "close b", "close a"]


@pytest.mark.parametrize(
    ("failure", "cause"),
    [(OSError("no route"), "OSError: no route"), ("hangs", r"TimeoutError: not done within 0\.05 s")],
)
async def test_one_that_does_not_start_is_named_and_those_begun_are_closed(failure, cause):
    journal = []
    broken = services(
        Service("a", journal), Service("b", journal, start=failure), Service("c", journal), timeout_s=0.05
    )
    with pytest.raises(NotStarted, match=rf"^p1 \(task:s\): start failed: {cause}$"):
        await broken.start()
    assert journal == ["start a", "start b", "close b", "close a"]


class Stubborn:
    """Ignores that it is cancelled, until it is released or 5 s are over."""

    released = False

    async def start(self):
        begun = time.monotonic()
        while not self.released and time.monotonic() < begun + 5:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)


async def test_one_that_ignores_its_deadline_does_not_hold_up_the_run(monkeypatch):
    monkeypatch.setattr("slimrl.rewards.deadline.END_S", 0.1)
    stubborn, begun = Stubborn(), time.monotonic()
    with pytest.raises(NotStarted, match=r"TimeoutError: not done within 0\.1 s"):
        await services(stubborn, timeout_s=0.1).start()
    stubborn.released = True
    assert time.monotonic() - begun < 3


async def test_one_that_exits_is_one_that_does_not_start():
    class Exits:
        async def start(self):
            sys.exit(3)

    with pytest.raises(NotStarted, match=r"TaskCodeExited: it raised SystemExit\(3\)"):
        await services(Exits()).start()


async def test_a_deadline_within_a_start_is_told_as_it_is():
    broken = services(Service("a", [], start=TimeoutError("http://judge did not answer within 5 s")))
    with pytest.raises(NotStarted, match="TimeoutError: http://judge did not answer within 5 s"):
        await broken.start()


@pytest.mark.parametrize("failure", [OSError("gone"), "hangs"])
async def test_one_that_does_not_close_is_logged_and_the_others_are_closed(failure, caplog):
    journal = []
    started = services(Service("a", journal), Service("b", journal, close=failure), timeout_s=0.05)
    await started.start()
    await started.close()
    assert journal[2:] == ["close b", "close a"]
    assert "p1 (task:s): close failed" in caplog.text


async def test_methods_of_these_names_that_are_not_asynchronous_are_left_alone():
    class Clock:
        def start(self):
            pytest.fail("it is something else")

    await services(Clock()).start()
