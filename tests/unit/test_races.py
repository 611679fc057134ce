"""Races against TRL: the work that they check, their ratio, and the demonstrations of the one with a tool."""

import importlib
import random
from pathlib import Path

import pytest
from slimrl_tools.toy.toy_tokenizer import build_tokenizer

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def bench():
    """Imports a file of benchmarks/."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module


def race_of(bench, **changes):
    work = {"model": Path(), "prompts": Path(), "slimrl": (), "trl": {}, "tools": False}
    return bench("rounds").Race(**work, **{"tokens": 100, "turns": 10, "tolerance": 0.1, **changes})


def test_steps_of_the_expected_work_are_kept(bench):
    steps = [{"tokens": 100, "turns": 9.5}, {"tokens": 118, "turns": 10}]
    assert race_of(bench)._checked(steps) == steps


@pytest.mark.parametrize(("key", "value"), [("tokens", 111), ("turns", 8.9)])
def test_other_work_is_refused(bench, key, value):
    with pytest.raises(ValueError, match=f"a step sampled {value:.0f} {key}, not"):
        race_of(bench)._checked([{"tokens": 100, "turns": 10, key: value}])


def test_fixed_work_allows_no_difference(bench):
    with pytest.raises(ValueError, match="a step sampled 101 tokens, not 100"):
        race_of(bench, tolerance=0)._checked([{"tokens": 101, "turns": 10}])


def test_the_ratio_is_above_1_if_slimrl_is_faster_and_needs_both_sides(bench):
    ratio_of = bench("rounds").ratio_of
    assert ratio_of({"TRL": {"total": 3.0}, "slimrl": {"total": 1.5}}) == 2
    assert ratio_of({"slimrl": {"total": 1.5}}) is None


def test_a_folder_that_is_no_environment_of_trl_is_left_alone(bench, tmp_path):
    (tmp_path / "mine").touch()
    with pytest.raises(ValueError, match="remove it"):
        bench("sides").make_venv(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_demonstration_counts_down_and_calls_in_every_turn_but_the_last(bench):
    messages = bench("race_agents").conversation(random.Random(0), [3, 1])
    roles = ["system", "user", "assistant", "tool", "assistant"]
    assert [message["role"] for message in messages] == roles
    asking, result, answer = messages[2:]
    (call,) = asking["tool_calls"]
    expression = call["function"]["arguments"]["expression"]
    assert messages[1]["content"] == f"Compute {expression}."
    assert result["content"] == str(eval(expression))
    assert asking["content"] == "2: 3 2 1"
    assert answer["content"] == f"1: 1 {expression} = \\boxed{{{result['content']}}}."


def test_the_expected_tokens_are_those_of_drawn_demonstrations(bench):
    agents, rng, tokenizer = bench("race_agents"), random.Random(7), build_tokenizer()
    counts = []
    for _ in range(400):
        lengths = [rng.choice(agents.LENGTHS) for _ in range(rng.choice(agents.TURNS))]
        text = tokenizer.apply_chat_template(agents.conversation(rng, lengths), tokenize=False)
        turns = text.split("<|im_start|>assistant\n")[1:]
        counts.append(sum(len(tokenizer.encode(turn.split("<|im_end|>")[0])) + 1 for turn in turns))
    assert agents.mean_tokens() == pytest.approx(sum(counts) / len(counts), rel=0.12)
