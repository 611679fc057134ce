"""Rewards against a table of answers, and how a reward function is applied."""

import asyncio
import threading
import time

import numpy as np
import pytest

from slimrl.data.trajectory import Prompt, Segment, Status, Trajectory
from slimrl.rewards.boxed import last_boxed
from slimrl.rewards.comparers import ComparerFailed, OutOfCpuTime
from slimrl.rewards.comparison import equivalent
from slimrl.rewards.math import boxed_equivalent, boxed_exact
from slimrl.rewards.scoring import score


def trajectory(text, role="assistant", status=Status.completed):
    segment = Segment(
        tokens=np.zeros(1, np.int32),
        loss_mask=np.ones(1, bool),
        rollout_logprobs=np.zeros(1, np.float32),
        weight_versions=np.zeros(1, np.int32),
        turn_ids=np.zeros(1, np.int16),
    )
    messages = [{"role": "assistant", "content": "\\boxed{42}"}, {"role": role, "content": text}]
    return Trajectory(group_id="g", trajectory_id="t", segments=[segment], status=status, messages=messages)


def prompt(label):
    return Prompt(prompt_id="g", messages=[{"role": "user", "content": "q"}], label=label)


EXACT = [
    ("\\boxed{42}", 42, 1),
    ("\\boxed{42}", "42", 1),
    ("\\boxed{42.0}", 42, 1),
    ("\\boxed{ 042 }.", 42, 1),
    ("\\boxed{+42}", 42, 1),
    ("\\boxed{$42$}", 42, 1),
    ("\\boxed{-42}", -42, 1),
    ("\\boxed{\N{MINUS SIGN}42}", -42, 1),
    ("\\boxed{1,234,567}", 1234567, 1),
    ("\\boxed{1{,}234}", 1234, 1),
    ("\\boxed{1\\,234}", 1234, 1),
    ("\\boxed{\\frac{1}{2}}", 0.5, 1),
    ("\\boxed{-\\frac{1}{2}}", "-1/2", 1),
    ("\\boxed{0.1}", "0.10", 1),
    ("\\boxed{x+y}", "x + y", 1),
    ("\\boxed{1} no, \\boxed{42}", 42, 1),
    ("\\boxed{42} and \\boxed{broken", 42, 1),
    ("\\boxed{12345678901234567890123}", 12345678901234567890123, 1),
    ("\\boxed{12345678901234567890124}", 12345678901234567890123, 0),
    ("\\boxed{42} no, \\boxed{1}", 42, 0),
    ("\\boxed{-42}", 42, 0),
    ("\\boxed{43}", 42, 0),
    ("\\boxed{4,2}", 42, 0),
    ("\\boxed{}", 42, 0),
    ("42", 42, 0),
    ("", 42, 0),
    ("\\boxed{40+2}", 42, 0),
    ("\\boxed{6*7}", 42, 0),
    ("\\boxed{1/0}", 42, 0),
    ("\\boxed{" + "9" * 5000 + "}", 42, 0),
]


@pytest.mark.parametrize(("text", "label", "reward"), EXACT)
def test_boxed_exact_gives_one_for_the_number_itself(text, label, reward):
    assert boxed_exact(trajectory(text), prompt(label)) == reward


@pytest.mark.parametrize("function", [boxed_exact, boxed_equivalent])
def test_a_box_in_a_tool_result_or_in_an_earlier_turn_is_no_answer(function):
    assert function(trajectory("\\boxed{42}", role="tool"), prompt(42)) == 0.0
    assert function(trajectory("I do not know"), prompt(42)) == 0.0


@pytest.mark.parametrize(
    ("answer", "label", "same"),
    [
        ("2\\sqrt{2}", "\\sqrt{8}", True),
        ("(x+1)^2", "x^2+2x+1", True),
        ("40+2", "42", True),
        ("\\sqrt{7}", "\\sqrt{8}", False),
        ("\\frac{1}{", "\\sqrt{8}", False),
    ],
)
def test_answers_are_compared_symbolically(answer, label, same):
    assert equivalent(answer, label) is same


class StandIn:
    """In place of the processes that compare: notes what they are asked."""

    def __init__(self, answer):
        self.answer, self.asked = answer, []

    def equivalent(self, answer, label):
        self.asked.append((answer, label))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize("same", [True, False])
def test_boxed_equivalent_asks_for_a_comparison_where_the_text_does_not_tell(monkeypatch, same):
    comparers = StandIn(same)
    monkeypatch.setattr("slimrl.rewards.math.shared_comparers", lambda: comparers)
    scored = trajectory("\\boxed{x+x}")
    assert boxed_equivalent(scored, prompt("2x")) == float(same)
    assert comparers.asked == [("x+x", "2x")]
    assert "reward_timed_out" not in scored.metadata


@pytest.mark.parametrize(
    ("text", "label", "reward"),
    [
        ("\\boxed{42}", 42, 1),
        ("\\boxed{41}", 42, 0),
        ("\\boxed{x + y}", "x+y", 1),
        ("\\boxed{" + "x+" * 200 + "1}", "x", 0),
    ],
)
def test_numbers_the_same_text_and_long_answers_need_no_comparison(monkeypatch, text, label, reward):
    monkeypatch.setattr("slimrl.rewards.math.shared_comparers", lambda: pytest.fail("a process was asked"))
    assert boxed_equivalent(trajectory(text), prompt(label)) == reward


def test_an_answer_that_takes_too_much_cpu_time_is_wrong_and_marked(monkeypatch):
    comparers = StandIn(OutOfCpuTime("5 s"))
    monkeypatch.setattr("slimrl.rewards.math.shared_comparers", lambda: comparers)
    scored = trajectory("\\boxed{9^{9^9}}")
    assert boxed_equivalent(scored, prompt("\\sqrt{8}")) == 0.0
    assert scored.metadata == {"reward_timed_out": True}


def test_a_comparison_that_failed_is_no_wrong_answer(monkeypatch):
    comparers = StandIn(ComparerFailed("ended by SIGKILL"))
    monkeypatch.setattr("slimrl.rewards.math.shared_comparers", lambda: comparers)
    with pytest.raises(ComparerFailed, match="SIGKILL"):
        boxed_equivalent(trajectory("\\boxed{x+x}"), prompt("2x"))


@pytest.mark.parametrize(
    ("text", "box"),
    [("\\boxed{a{b}c}", "a{b}c"), ("\\boxed{a", None), ("", None), ("\\boxed{a}\\boxed{\\boxed{b}}", "b")],
)
def test_the_last_closed_box_is_taken_with_its_braces_matched(text, box):
    assert last_boxed(text) == box


async def test_synchronous_and_asynchronous_functions_and_parts_are_applied():
    async def later(trajectory, prompt):
        await asyncio.sleep(0)
        return {"right": 1.0, "short": 0.25}

    first, second = trajectory("\\boxed{42}"), trajectory("")
    await score(first, prompt(42), boxed_exact, 5)
    await score(second, prompt(42), later, 5)
    assert (first.reward, first.rewards) == (1.0, {"reward": 1.0})
    assert (second.reward, second.rewards) == (1.25, {"right": 1.0, "short": 0.25})


async def test_a_failed_trajectory_is_not_scored():
    failed = trajectory("\\boxed{42}", status=Status.failed)
    await score(failed, prompt(42), boxed_exact, 5)
    assert np.isnan(failed.reward)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "1", {"a": float("nan")}])
async def test_a_reward_that_is_no_finite_number_is_refused(value):
    with pytest.raises(ValueError, match="finite numbers are needed"):
        await score(trajectory(""), prompt(1), lambda trajectory, prompt: value, 5)


async def test_a_reward_function_has_a_deadline():
    async def never(trajectory, prompt):
        await asyncio.sleep(60)

    with pytest.raises(TimeoutError):
        await score(trajectory(""), prompt(1), never, 0.05)


def test_a_reward_function_that_hangs_does_not_hold_up_the_end_of_the_event_loop():
    release = threading.Event()

    def hang(trajectory, prompt):
        return float(release.wait(20))

    start = time.monotonic()
    try:
        with pytest.raises(TimeoutError):
            asyncio.run(score(trajectory(""), prompt(1), hang, 0.05))
        assert time.monotonic() - start < 5
    finally:
        release.set()
