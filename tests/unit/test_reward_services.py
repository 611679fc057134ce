"""Rewards that are started before the first rollout and closed at the end."""

import asyncio

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
    ("failure", "cause"), [(OSError("no route"), "OSError: no route"), ("hangs", r"not done within 0\.05 s")]
)
async def test_one_that_does_not_start_is_named_and_those_begun_are_closed(failure, cause):
    journal = []
    broken = services(
        Service("a", journal), Service("b", journal, start=failure), Service("c", journal), timeout_s=0.05
    )
    with pytest.raises(NotStarted, match=rf"^p1 \(task:s\): start failed: {cause}$"):
        await broken.start()
    assert journal == ["start a", "start b", "close b", "close a"]


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
