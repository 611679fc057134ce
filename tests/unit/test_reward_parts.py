"""Rewards of named parts: weights, caps, rewards of turns, parts that a prompt names, and retries."""

import asyncio
import math

import numpy as np
import pytest
from reward_cases import asked, said

from slimrl.rewards.parts import Part, PartFailed, PartsReward, SingleReward
from slimrl.rewards.retries import Retries
from slimrl.rewards.scoring import Score, score


def part(name, value, **settings):
    """A part whose function returns `value`, or raises it."""

    def function(trajectory, prompt):
        if isinstance(value, Exception):
            raise value
        return value

    return Part(name=name, function=function, path=f"task:{name}", **settings)


def scored(reward, prompt=None, trajectory=None, timeout_s=10.0):
    trajectory = trajectory or said("x")
    asyncio.run(score(trajectory, prompt or asked(), reward, timeout_s))
    return trajectory


def test_the_reward_is_the_weighted_sum_of_the_parts_and_each_is_kept_as_it_was():
    found = scored(
        PartsReward(parts=[part("right", 1.0, weight=2.0), part("short", 0.5), part("cost", 3, weight=-0.1)])
    )
    assert found.reward == pytest.approx(2.0 * 1.0 + 0.5 - 0.3)
    assert found.rewards == {"right": 1.0, "short": 0.5, "cost": 3.0}


@pytest.mark.parametrize(("value", "counts"), [(5.0, 0.5), (-5.0, -0.5), (0.25, 0.25)])
def test_a_cap_limits_what_a_part_counts_on_both_sides_and_not_what_is_kept(value, counts):
    found = scored(PartsReward(parts=[part("proxy", value, cap=0.5, weight=2.0)]))
    assert (found.reward, found.rewards) == (2 * counts, {"proxy": value})


def test_a_part_of_weight_0_is_kept_and_counts_nothing():
    found = scored(PartsReward(parts=[part("right", 1.0), part("seen", 7.0, weight=0.0)]))
    assert (found.reward, found.rewards) == (1.0, {"right": 1.0, "seen": 7.0})


def test_what_a_part_names_within_itself_is_added_up_and_kept_below_its_name():
    found = scored(PartsReward(parts=[part("format", {"think": 1.0, "tag": 0.5}, cap=1.0)]))
    assert (found.reward, found.rewards) == (1.0, {"format": 1.5, "format/think": 1.0, "format/tag": 0.5})


def test_rewards_of_turns_are_capped_weighted_and_added_by_turn():
    two_turns = [{"role": "assistant", "content": "a"}]
    steps = part("steps", Score(reward=0.0, turn_rewards=[1.0, 9.0]), cap=2.0, weight=0.5)
    tools = part("tools", Score(reward={"all": 1.0}, turn_rewards=np.float32([0.25, 0.0])))
    found = scored(PartsReward(parts=[steps, tools]), trajectory=said("b", before=two_turns))
    assert (found.reward, found.turn_rewards) == (1.0, [0.5 + 0.25, 1.0])


def test_parts_that_disagree_on_the_turns_or_both_give_advantages_fail():
    one = part("one", Score(reward=0.0, turn_rewards=[1.0]))
    two = part("two", Score(reward=0.0, turn_rewards=[1.0, 2.0]))
    with pytest.raises(ValueError, match=r"parts give rewards of \[1, 2\] turns"):
        scored(PartsReward(parts=[one, two]))
    given = Score(reward=0.0, advantage=0.0, turn_states=["a"])
    assert scored(PartsReward(parts=[part("a", given), part("b", 1.0)])).advantage == 0.0
    with pytest.raises(ValueError, match="two parts give advantage; only one may"):
        scored(PartsReward(parts=[part("a", given), part("b", given)]))


def test_a_prompt_has_the_part_that_its_metadata_names_beside_those_of_every_prompt():
    reward = PartsReward(
        parts=[part("format", 0.5)], by_name={"math": part("math", 1.0), "qa": part("qa", 2.0)}, name_key="source"
    )
    assert scored(reward, asked(source="math")).rewards == {"format": 0.5, "math": 1.0}
    assert scored(reward, asked(source="qa")).reward == 2.5
    assert scored(reward, asked(reward="qa")).rewards == {"format": 0.5}


def test_parts_run_at_the_same_time():
    together = asyncio.Event()

    async def waits(trajectory, prompt):
        await together.wait()
        return 1.0

    async def frees(trajectory, prompt):
        together.set()
        return 1.0

    parts = [Part(name=f.__name__, function=f, path="") for f in (waits, frees)]
    assert scored(PartsReward(parts=parts)).reward == 2.0


@pytest.mark.parametrize("value", [math.nan, math.inf, "1", None, {"a": math.nan}])
def test_a_part_that_is_no_finite_number_fails_even_with_a_cap_and_weight_0(value):
    with pytest.raises(ValueError, match="must be a finite number"):
        scored(PartsReward(parts=[part("proxy", value, cap=1.0, weight=0.0)]))


def test_the_part_that_failed_is_named_with_its_function_and_the_others_are_cancelled():
    cancelled = []

    async def slow(trajectory, prompt):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    parts = [part("judge", ConnectionError("away")), Part(name="slow", function=slow, path="task:slow")]
    with pytest.raises(PartFailed, match=r"^judge \(task:judge\) failed: ConnectionError: away$"):
        scored(PartsReward(parts=parts))
    assert cancelled == [True]


def test_parts_that_are_too_slow_miss_the_deadline_of_the_trajectory():
    async def slow(trajectory, prompt):
        await asyncio.sleep(60)

    with pytest.raises(TimeoutError, match=r"^no reward within 0\.05 s from slow \(task:slow\)$"):
        scored(PartsReward(parts=[Part(name="slow", function=slow, path="task:slow")]), timeout_s=0.05)


class Flaky:
    """Fails the first `failures` times."""

    def __init__(self, failures, error):
        self.failures, self.error, self.calls = failures, error, 0

    def __call__(self, trajectory, prompt):
        self.calls += 1
        if self.calls <= self.failures:
            raise self.error
        return 1.0


RETRIES = Retries(limit=2, errors=(ConnectionError, TimeoutError), first_delay_s=0.001)


@pytest.mark.parametrize("kind", ["alone", "part"])
def test_a_call_that_failed_is_repeated_and_counted(kind):
    flaky = Flaky(2, ConnectionResetError("gone"))
    whole = Part(name="" if kind == "alone" else "judge", function=flaky, path="task:judge")
    reward = (
        SingleReward(part=whole, retries=RETRIES) if kind == "alone" else PartsReward(parts=[whole], retries=RETRIES)
    )
    found = scored(reward)
    assert (found.reward, flaky.calls, found.metadata["num_reward_retries"]) == (1.0, 3, 2)


@pytest.mark.parametrize(("error", "calls"), [(ConnectionError("away"), 3), (ValueError("a fault"), 1)])
def test_it_is_repeated_as_often_as_the_recipe_says_and_only_after_the_errors_that_it_names(error, calls):
    flaky = Flaky(9, error)
    reward = SingleReward(part=Part(name="", function=flaky, path="task:judge"), retries=RETRIES)
    with pytest.raises(PartFailed, match=rf"^task:judge failed: {type(error).__name__}: {error}$"):
        scored(reward)
    assert flaky.calls == calls


def test_each_retry_waits_twice_as_long_as_the_one_before(monkeypatch):
    waited = []

    async def sleep(delay_s):
        waited.append(delay_s)

    monkeypatch.setattr("slimrl.rewards.retries.asyncio.sleep", sleep)

    async def attempt():
        raise ConnectionError

    with pytest.raises(ConnectionError):
        asyncio.run(Retries(limit=3, errors=(OSError,)).call(attempt, "name", lambda: None))
    assert waited == [0.5, 1.0, 2.0]
