"""Rewards against a table of answers, and how a reward function is applied."""

import asyncio
import math
import threading
import time
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch

from slimrl.base.answering_process import OutOfCpuTime, ProcessFailed
from slimrl.base.threads import TaskCodeExited
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Segment, Status, Trajectory
from slimrl.rewards.comparison import equivalent
from slimrl.rewards.math import boxed_equivalent, boxed_exact
from slimrl.rewards.scoring import Score, score
from slimrl.rewards.texts import boxed


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
def test_a_label_that_no_answer_can_equal_is_refused(function):
    """As of a column that holds the answer in an object."""
    with pytest.raises(ValueError, match=r"the label of g: \"\{'ground_truth': '42'\}\" is no text and no number"):
        function(trajectory("\\boxed{42}"), prompt({"ground_truth": "42"}))


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
        ("\\foo{5} garbage 5", "5", False),
        ("x > 2", "(2, \\infty)", True),
        ("1.6\\cdot10^{-19}\\pi", "9.1\\cdot10^{-31}\\pi", False),
        ("2^{-100}\\pi", "2^{-101}\\pi", False),
        ("2^{-100}\\pi", "4^{-50}\\pi", True),
        ("1.41421356", "\\sqrt{2}", True),
        ("+\\infty", "\\infty", True),
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
    comparers = StandIn(ProcessFailed("ended by SIGKILL"))
    monkeypatch.setattr("slimrl.rewards.math.shared_comparers", lambda: comparers)
    with pytest.raises(ProcessFailed, match="SIGKILL"):
        boxed_equivalent(trajectory("\\boxed{x+x}"), prompt("2x"))


@pytest.mark.parametrize(
    ("text", "box"),
    [
        ("\\boxed{a{b}c}", "a{b}c"),
        ("\\boxed{a", None),
        ("", None),
        ("\\boxed{a}\\boxed{\\boxed{b}}", "b"),
        ("\\boxed{\\left\\{ 1 \\right.}", "\\left\\{ 1 \\right."),
        ("\\boxed{1 \\\\{2}}", "1 \\\\{2}"),
    ],
)
def test_the_last_closed_box_is_taken_with_its_braces_matched(text, box):
    assert boxed(text) == box


async def later(trajectory, prompt):
    await asyncio.sleep(0)
    return {"right": 1.0, "short": 0.25}


class AsyncJudge:
    async def __call__(self, trajectory, prompt):
        return await later(trajectory, prompt)


async def test_a_plain_number_is_the_reward_and_has_no_parts():
    scored = trajectory("\\boxed{42}")
    await score(scored, prompt(42), boxed_exact, 5)
    assert (scored.reward, scored.rewards) == (1.0, {})


@pytest.mark.parametrize(
    "function",
    [later, AsyncJudge(), partial(later), lambda trajectory, prompt: later(trajectory, prompt)],
    ids=["function", "object", "partial", "lambda"],
)
async def test_asynchronous_functions_of_every_form_and_parts_are_applied(function):
    scored = trajectory("")
    await score(scored, prompt(42), function, 5)
    assert (scored.reward, scored.rewards) == (1.25, {"right": 1.0, "short": 0.25})


async def test_a_failed_trajectory_is_not_scored():
    failed = trajectory("\\boxed{42}", status=Status.failed)
    await score(failed, prompt(42), boxed_exact, 5)
    assert np.isnan(failed.reward)


@pytest.mark.parametrize("status", [Status.completed, Status.truncated, Status.aborted])
async def test_every_other_trajectory_is_scored(status):
    scored = trajectory("\\boxed{42}", status=status)
    await score(scored, prompt(42), boxed_exact, 5)
    assert (scored.reward, scored.status) == (1.0, status)


@pytest.mark.parametrize(
    "value",
    [np.float32(0.5), np.float64(0.5), np.array(0.5), torch.tensor(0.5), torch.tensor([0.5]), Fraction(1, 2)],
    ids=repr,
)
async def test_numbers_of_numpy_torch_and_others_are_rewards(value):
    scored, parts = trajectory(""), trajectory("")
    await score(scored, prompt(1), lambda trajectory, prompt: value, 5)
    await score(parts, prompt(1), lambda trajectory, prompt: {"a": value}, 5)
    assert (scored.reward, parts.reward, parts.rewards) == (0.5, 0.5, {"a": 0.5})
    assert type(scored.reward) is type(parts.rewards["a"]) is float


@pytest.mark.parametrize("value", [True, np.True_, torch.tensor(True)], ids=repr)
async def test_true_is_a_reward_of_one(value):
    scored = trajectory("")
    await score(scored, prompt(1), lambda trajectory, prompt: value, 5)
    assert scored.reward == 1.0


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), 10**400, None, "1", b"1", 1j, [1.0], torch.ones(2), np.ones(2), np.float32("nan"),
     {"a": float("nan")}, {"a": "1"}],
    ids=lambda value: repr(value)[:16],
)  # fmt: skip
async def test_a_reward_that_is_no_finite_number_is_refused(value):
    with pytest.raises(ValueError, match="must be a finite number"):
        await score(trajectory(""), prompt(1), lambda trajectory, prompt: value, 5)


@pytest.mark.parametrize("name", ["", 1, None])
async def test_a_part_without_a_name_is_refused(name):
    with pytest.raises(ValueError, match="named a part"):
        await score(trajectory(""), prompt(1), lambda trajectory, prompt: {name: 1.0}, 5)


async def test_a_reward_function_has_a_deadline_which_is_named():
    async def never(trajectory, prompt):
        await asyncio.sleep(60)

    with pytest.raises(TimeoutError, match=r"^no reward within 0\.05 s$"):
        await score(trajectory(""), prompt(1), never, 0.05)


async def test_a_timeout_of_the_rewards_own_is_raised_as_it_is():
    async def of_its_own(trajectory, prompt):
        raise TimeoutError("the judge did not answer")

    with pytest.raises(TimeoutError, match="the judge did not answer"):
        await score(trajectory(""), prompt(1), of_its_own, 60)


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError()], ids=repr)
async def test_a_reward_that_exits_is_named_at_once(error):
    def exits(trajectory, prompt):
        raise error

    async def exits_later(trajectory, prompt):
        raise error

    for function in (exits, exits_later):
        with pytest.raises(TaskCodeExited) as caught:
            await score(trajectory(""), prompt(1), function, 60)
        assert repr(error) in str(caught.value)


async def test_a_rollout_that_is_cancelled_cancels_its_rewards():
    cancelled = []

    async def never(trajectory, prompt):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    task = asyncio.create_task(score(trajectory(""), prompt(1), never, 60))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cancelled == [True]


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


def test_a_score_gives_what_belongs_to_the_turns():
    scored = trajectory("x")
    given = Score(
        reward={"answer": 1, "format": 0.5}, turn_rewards=np.float32([0.25]), turn_states=["kitchen"],
        advantage=torch.tensor(2.0), turn_advantages=[-1],
    )  # fmt: skip
    asyncio.run(score(scored, prompt(1), lambda *_: given, 10.0))
    assert (scored.reward, scored.rewards) == (1.5, {"answer": 1.0, "format": 0.5})
    assert (scored.turn_rewards, scored.turn_states) == ([0.25], ["kitchen"])
    assert (scored.advantage, scored.turn_advantages) == (2.0, [-1.0])


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"turn_rewards": [1.0, 2.0]}, "turn_rewards has 2 entries, and the trajectory 1 turns"),
        ({"turn_rewards": [math.nan]}, "the reward function returned turn_rewards = nan"),
        ({"turn_states": [7]}, "a state 7 among turn_states"),
        ({"advantage": math.inf}, "the reward function returned advantage = inf"),
        ({"turn_advantages": ["1"]}, "the reward function returned turn_advantages = '1'"),
    ],
)
def test_a_score_that_does_not_fit_the_turns_is_refused(given, problem):
    scored = trajectory("x")
    with pytest.raises(ValueError, match=problem):
        asyncio.run(score(scored, prompt(1), lambda *_: Score(reward=1.0, **given), 10.0))
    # A file of failed trajectories can be read, too.
    scored.check_turns()
