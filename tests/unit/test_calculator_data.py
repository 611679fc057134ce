"""The calculator task's files: disjoint, reproducible, right, and as short as the toy model needs them."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import yaml
from slimrl_tools.toy.calculator_data import guess, write_calculator_data
from slimrl_tools.toy.task_lines import SYSTEM_PROMPT
from slimrl_tools.toy.toy_tokenizer import build_tokenizer

from slimrl.agent.chat.chat_format import ChatFormat
from slimrl.agent.chat.template import ChatTemplate
from slimrl.data.prompts import read_conversations, read_prompts

RECIPES = Path(__file__).parents[2] / "recipes" / "tiny_moe"


def write(out, seed=0):
    write_calculator_data(out, seed=seed, num_train=400, num_heldout=500, num_conversations=600)
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("task") / "data")


def test_labels_are_what_python_computes(folder):
    for prompt in [*read_prompts(folder / "train.jsonl"), *read_prompts(folder / "heldout.jsonl")]:
        expression = prompt.metadata["expression"]
        assert prompt.label == eval(expression)
        assert expression in prompt.messages[0]["content"]
        assert len(re.findall(r"[+*-]", expression)) in (2, 3)
        assert "*" in expression


def test_heldout_problems_are_in_no_training_file(folder):
    heldout = {prompt.metadata["expression"] for prompt in read_prompts(folder / "heldout.jsonl")}
    assert len(heldout) == 500
    assert not heldout & {prompt.metadata["expression"] for prompt in read_prompts(folder / "train.jsonl")}
    conversations = (folder / "sft.jsonl").read_text()
    asked = [
        re.search(r"[\d(][\d+*()-]+[\d)]", c.messages[1]["content"]) for c in read_conversations(folder / "sft.jsonl")
    ]
    assert not heldout & {match.group(0) for match in asked if match}
    assert len(conversations.splitlines()) == 600


def test_the_same_seed_gives_the_same_files_and_another_seed_others(folder, tmp_path):
    again, other = write(tmp_path / "again"), write(tmp_path / "other", seed=1)
    for name in ("train.jsonl", "heldout.jsonl", "sft.jsonl"):
        assert (again / name).read_bytes() == (folder / name).read_bytes()
        assert (other / name).read_bytes() != (folder / name).read_bytes()


def test_an_existing_folder_is_not_overwritten(folder):
    with pytest.raises(ValueError, match="not overwritten"):
        write(folder)


def test_demonstrations_behave_as_they_are_said_to(folder):
    behaviours = Counter()
    for conversation in read_conversations(folder / "sft.jsonl"):
        text = conversation.messages[1]["content"]
        kind = "question" if text.startswith(("What", "Find", "Tell")) else "order"
        value = eval(re.search(r"[\d(][\d+*()-]+[\d)]", text).group(0))
        right = conversation.messages[-1]["content"].endswith(f"\\boxed{{{value}}}.")
        called = any(message["role"] == "tool" for message in conversation.messages)
        assert right <= called, "an answer without the calculator is never right"
        behaviours[kind, "right" if right else "wrong"] += 1
    assert 0.80 < behaviours["order", "right"] / (behaviours["order", "right"] + behaviours["order", "wrong"]) < 0.92
    assert (
        0.15
        < behaviours["question", "right"] / (behaviours["question", "right"] + behaviours["question", "wrong"])
        < 0.36
    )


@pytest.mark.parametrize("value", [0, 5, -7, 10, 99, 100, -1234, 120000])
def test_a_guess_is_near_and_never_right(value):
    assert guess(value) != value
    assert abs(guess(value) - value) <= max(1, abs(value) // 10)


def test_conversations_stay_short(folder):
    tokenizer = build_tokenizer()
    chat = ChatFormat(ChatTemplate(tokenizer), [tokenizer.eos_token_id])
    conversations = read_conversations(folder / "sft.jsonl")
    lengths = [len(tokens) for c in conversations for tokens, _ in chat.training_sequences(c.messages, c.tools)]
    assert len(lengths) == len(conversations)
    assert sum(lengths) / len(lengths) < 150
    assert max(lengths) < yaml.safe_load((RECIPES / "sft.yaml").read_text())["sft"]["max_tokens"]


def test_the_recipes_system_prompt_is_that_of_the_conversations(folder):
    recipe = yaml.safe_load((RECIPES / "gspo_calculator.yaml").read_text())
    assert recipe["agent"]["system_prompt"] == SYSTEM_PROMPT
    first = json.loads((folder / "sft.jsonl").read_text().splitlines()[0])
    assert first["messages"][0] == {"role": "system", "content": SYSTEM_PROMPT}


@pytest.mark.parametrize(
    ("value", "guessed"),
    [
        (12345, 12000),
        (9876543, 9900000),
        (-12745, -13000),
        (1200, 1300),
        (-1200, -1100),
        (1250, 1200),
        (37, 38),
        (5, 6),
    ],
)
def test_a_guess_has_two_digits_and_is_never_right(value, guessed):
    assert guess(value) == guessed
