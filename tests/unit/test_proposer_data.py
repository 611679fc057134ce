"""Arithmetic that a proposer makes up: what is a task, its exact answer, and the files of the toy's task."""

import json
import random
import re
from fractions import Fraction

import pytest
from slimrl_tools.toy.proposer_data import write_proposer_data

from slimrl.agent.roles.arithmetic import answer_of
from slimrl.data.prompts import read_conversations, read_prompts


def expression(rng: random.Random, depth: int) -> str:
    if depth == 0:
        return str(rng.randrange(1000))
    left, right = (expression(rng, rng.randrange(depth)) for _ in range(2))
    text = f"{left} {rng.choice('+-*/')} {right}"
    return f"({text})" if rng.random() < 0.5 else text


def test_answers_are_those_of_exact_fractions():
    rng, wholes = random.Random(0), 0
    for _ in range(500):
        text = expression(rng, 3)
        exact = re.sub(r"\d+", lambda found: f"Fraction({found[0]})", text)
        try:
            value = eval(exact, {"Fraction": Fraction})
        except ZeroDivisionError:
            assert answer_of(text) is None
            continue
        if not set(text) & set("+-*/") or len(text) > 100:
            assert answer_of(text) is None
            continue
        assert Fraction(answer_of(text)) == value
        wholes += value.denominator == 1
    assert 100 < wholes < 450


@pytest.mark.parametrize(
    "text",
    ["", "12", "-12", "(7)", "2 ** 3", "7 // 2", "7 % 2", "1.5 + 1", "2 +", "(2 + 3", "1 / 0", "a + 1", "1 + 1\n",
     "1e3 + 1", "1234567 + 1", "٣ + 1", "007 + 1", "+ 2", "1 + 1" + " + 1" * 40, "__import__('os')", "2 3 + 1",
     "1 if 1 + 1 else 2"],
)  # fmt: skip
def test_what_is_no_expression_has_no_answer(text):
    assert answer_of(text) is None


def test_the_files_ask_for_tasks_of_three_levels_and_no_demonstration_solves_a_held_out_one(tmp_path):
    write_proposer_data(tmp_path / "data", seed=0, num_train=50, num_heldout=60, num_conversations=900)
    for name, numbers, digits in (("train", 2, "12345"), ("level_1", 2, "123456789"), ("level_2", 3, "12345")):
        prompts = read_prompts(tmp_path / f"data/{name}.jsonl")
        assert len(prompts) == 50
        for prompt in prompts:
            wanted = prompt.metadata["contains"]
            assert len(wanted) == numbers
            assert all(one in digits for one in wanted)
            assert re.findall(r"\d+", prompt.messages[0]["content"]) == wanted
    heldout = read_prompts(tmp_path / "data/heldout.jsonl")
    for prompt in heldout:
        assert eval(prompt.metadata["task"]) == int(prompt.label)
    solved, right, proposed, valid = set(), 0, 0, 0
    for told in read_conversations(tmp_path / "data/sft.jsonl"):
        asked, said = (message["content"] for message in told.messages)
        if task := re.fullmatch(r"<task>(.*)</task>", said):
            proposed += 1
            wanted = re.findall(r"\d+", asked)
            valid += answer_of(task[1]) is not None and sorted(re.findall(r"\d+", task[1])) == sorted(wanted)
            continue
        text, _, _ = asked.partition("\n\n")
        solved.add(text)
        right += said == f"The answer is \\boxed{{{eval(text)}}}."
    assert solved & {prompt.metadata["task"] for prompt in heldout} == set()
    assert proposed == 300
    assert 0.6 < valid / proposed < 0.9
    assert 0.5 < right / 600 < 0.7
    write_proposer_data(tmp_path / "again", seed=0, num_train=50, num_heldout=60, num_conversations=900)
    for name in ("train", "heldout", "sft"):
        lines = (tmp_path / f"data/{name}.jsonl").read_text()
        assert lines == (tmp_path / f"again/{name}.jsonl").read_text()
        assert all(json.loads(line) for line in lines.splitlines())
