"""Shaping and unsupervised rewards, against their formulas written out here."""

import math

import pytest
from reward_cases import asked, said, sampled

from slimrl.rewards.calibration import Calibration, stated_confidence
from slimrl.rewards.length import CosineLength, Repetition
from slimrl.rewards.loading import NO_SUPPLIES
from slimrl.rewards.tool_use import PlanConsistency, ResultUse, ToolSuccess
from slimrl.rewards.unsupervised import Confidence, SelfConsistency
from slimrl.rewards.verifier import OfVerifier

EXACT = "slimrl.rewards.answers:ExactMatch"


def with_tokens(text, tokens, logprobs=None, turns=None):
    trajectory = said(text)
    trajectory.segments = [sampled([0, *tokens], logprobs or [-0.5] * len(tokens), turns)]
    return trajectory


@pytest.mark.parametrize(
    ("tokens", "right", "value"),
    [
        (0, True, 1.0), (50, True, 0.75), (25, True, 0.5 + 0.25 * (1 + math.sqrt(0.5))),
        (0, False, -0.5), (50, False, -0.25), (99, False, -0.25 * (1 + math.cos(0.99 * math.pi))),
        (100, True, -0.5), (101, True, -0.5), (300, False, -0.5),
    ],
)  # fmt: skip
async def test_cosine_of_length(tokens, right, value):
    reward = CosineLength(of=EXACT, max_tokens=100)
    trajectory = with_tokens("x", range(tokens))
    assert await reward(trajectory, asked("x" if right else "y")) == pytest.approx(value)


@pytest.mark.parametrize(
    "values", [{"wrong": [0.0, -0.5]}, {"wrong": [0.1, 0.2]}, {"right": [0.5, 1.0]}, {"exceed": 0.1}]
)
def test_a_cosine_that_pays_for_giving_up_is_refused(values):
    with pytest.raises(ValueError, match=r"give wrong\[0\]"):
        CosineLength(of=EXACT, max_tokens=10, **values)


@pytest.mark.parametrize(
    ("tokens", "turns", "cost"),
    [
        ([1, 2, 3, 4, 5], None, 0.0),
        ([1, 2, 1, 2, 1], None, -0.5),  # 12 21 12 21
        ([7] * 11, None, -0.9),
        ([1, 2, 1, 2], [0, 0, 1, 1], -0.5),  # 12 | 12: a later turn says the same, and none crosses
        ([1], None, 0.0),
    ],
)
def test_repetition_is_the_share_of_ngrams_seen_before(tokens, turns, cost):
    assert Repetition(ngram=2)(with_tokens("x", tokens, turns=turns), asked()) == pytest.approx(cost)


@pytest.mark.parametrize(
    ("text", "label", "brier"),
    [
        ("x <confidence>0.8</confidence>", "x", -0.04),
        ("x <confidence>80 %</confidence>", "y", -0.64),
        ("x <confidence>1</confidence>", "x", 0.0),
        ("x", "x", -1.0),
    ],
)
async def test_calibration_is_correctness_less_the_brier_score(text, label, brier):
    reward = Calibration(of="slimrl.rewards.answers:ExactMatch", of_args={"answer_in": "<answer>"})
    parts = await reward(said(text.replace("x", "<answer>x</answer>", 1)), asked(label))
    assert parts == {"correct": float(label == "x"), "brier": pytest.approx(brier)}


def test_the_confidence_that_is_true_pays_most():
    for chance in (0.1, 0.3, 0.75):
        paid = {q: chance * -((q - 1) ** 2) + (1 - chance) * -(q**2) for q in [n / 100 for n in range(101)]}
        assert max(paid, key=paid.get) == pytest.approx(chance)
        assert stated_confidence(f"<c>{chance}</c>", "c") == chance


@pytest.mark.parametrize("stated", ["1.01", "150%", "2", "-0.5", "nan", "1e0", "0.5 0.5", ""])
def test_what_is_no_confidence_counts_as_none(stated):
    assert stated_confidence(f"<c>{stated}</c>", "c") is None


async def test_a_verifier_is_a_reward_by_its_path_with_values_from_0_to_1():
    with pytest.raises(ValueError, match=r"no module|has no"):
        OfVerifier("slimrl.rewards.answers:Exact", None, NO_SUPPLIES)
    with pytest.raises(ValueError, match="cannot be called"):
        OfVerifier(EXACT, {"power": 2}, NO_SUPPLIES)
    costs = OfVerifier("slimrl.rewards.length:Repetition", {"ngram": 1}, NO_SUPPLIES)
    with pytest.raises(ValueError, match="must give 0 to 1 here"):
        await costs.correctness(with_tokens("x", [1, 1]), asked())


@pytest.mark.parametrize(("calls", "errors", "value"), [(0, 0, 0), (3, 0, 1), (3, 1, 0.75), (2, 2, 0), (90, 5, 0)])
def test_success_of_calls(calls, errors, value):
    given = said("x", num_tool_calls=calls, num_tool_errors=errors)
    assert ToolSuccess()(given, asked()) == value


def called(name, **arguments):
    return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}


def told(text):
    return {"role": "tool", "content": text}


@pytest.mark.parametrize(
    ("messages", "text", "value"),
    [
        ([called("f"), told("The tower is 330 m high")], "It is 330 m.", 1),
        ([called("f"), told("The tower is 330 m high")], "I do not know.", 0),
        ([called("f"), told("330"), called("g", number=330), told("okay fine")], "Done.", 0.5),
        ([called("f"), told("a of q")], "Done.", 0),
    ],
)
def test_a_result_is_used_if_something_new_in_it_is_said_later(messages, text, value):
    assert ResultUse()(said(text, before=messages), asked(text="How high?")) == value


@pytest.mark.parametrize(
    ("plan", "calls", "value"),
    [
        ("1. search: find it\n2. open: read it", ["search", "open"], 1),
        ("- search\n- `open`", ["open", "search"], 0.5),
        ("1. search", ["search", "search", "open"], 0.5),
        ("search, then open", ["search"], 0),
        ("1. search", [], 0),
    ],
)
def test_a_plan_is_kept_as_far_as_the_calls_follow_it(plan, calls, value):
    first = {"role": "assistant", "content": f"<plan>{plan}</plan>"}
    given = said("Done.", before=[first, *(message for name in calls for message in (called(name), told("r")))])
    assert PlanConsistency()(given, asked()) == pytest.approx(value)


@pytest.mark.parametrize(
    ("answers", "rewards"),
    [
        (["1", "1", "2", None], [1, 1, 0, 0]),
        (["1", "1", "2", "2"], [0, 0, 0, 0]),
        (["1", "2", "3", "4"], [0, 0, 0, 0]),
        ([None, None, None, "1"], [0, 0, 0, 0]),
        (["The Seine", "seine.", "Loire"], [1, 1, 0]),
        (["1"], [0]),
    ],
)
def test_the_majority_of_a_group_is_right(answers, rewards):
    group = [said("?" if answer is None else f"\\boxed{{{answer}}}") for answer in answers]
    assert SelfConsistency()(group, asked()) == rewards


def test_confidence_is_the_geometric_mean_of_the_probabilities():
    given = with_tokens("x", [5, 6, 7], [math.log(0.5), math.log(0.25), math.log(1.0)])
    assert Confidence()(given, asked()) == pytest.approx((0.5 * 0.25) ** (1 / 3), rel=1e-6)
    given.segments.append(sampled([0, 9], [math.log(0.125)]))
    assert Confidence()(given, asked()) == pytest.approx((0.5 * 0.25 * 0.125) ** (1 / 4), rel=1e-6)
