"""The files of the Python task and of the search task: disjoint, reproducible, right, and as short as the toy needs."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import yaml
from slimrl_tools.toy.python_data import KINDS, write_python_data
from slimrl_tools.toy.search_data import NUM_RESULTS, write_search_data
from slimrl_tools.toy.task_lines import SYSTEM_PROMPT
from slimrl_tools.toy.toy_tokenizer import build_tokenizer

from slimrl.agent.chat.chat_format import ChatFormat
from slimrl.agent.chat.template import ChatTemplate
from slimrl.data.prompts import read_conversations, read_prompts

RECIPES = Path(__file__).parents[2] / "recipes" / "tiny_moe"
WRITE = {"python": write_python_data, "search": write_search_data}
COUNTS = {"num_train": 300, "num_heldout": 200, "num_conversations": 400}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) / "data" for name in WRITE}
    for name, folder in made.items():
        WRITE[name](folder, seed=0, **COUNTS)
    return made


def answer_of(conversation) -> str:
    return re.search(r"\\boxed\{ ?(.*?) ?\}", conversation.messages[-1]["content"]).group(1)


def numbers_of(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))


def fibonacci_like(a: int, b: int, n: int) -> int:
    terms = [a, b]
    while len(terms) < n:
        terms.append(terms[-1] + terms[-2])
    return terms[n - 1]


def gcd(a: int, b: int) -> int:
    return max(d for d in range(1, min(a, b) + 1) if a % d == 0 and b % d == 0)


SOLVED = {
    "squares": lambda a, b: (b * (b + 1) * (2 * b + 1) - (a - 1) * a * (2 * a - 1)) // 6,
    "multiples": lambda *n: sum(not i % 7 or not i % min(x for x in n if x > 7) for i in range(1, max(n) + 1)),
    "remainder": lambda a, b, m: a**b % m,
    "digits": lambda a, b: sum(map(int, str(a * b))),
    "sequence": lambda *n: fibonacci_like(*n) if n[0] > 10 and n[2] < 20 else 0,
    "divisor": gcd,
}  # fmt: skip
"""Kind of question -> the answer from the numbers in the question, computed in another way"""


def test_labels_of_python_questions_are_what_another_computation_gives(folders):
    kinds = Counter()
    for prompt in read_prompts(folders["python"] / "train.jsonl"):
        kind, numbers = prompt.metadata["kind"], numbers_of(prompt.messages[0]["content"])
        if kind == "sequence" and prompt.messages[0]["content"].startswith("What"):
            numbers = (numbers[1], numbers[2], numbers[0])
        assert prompt.label == SOLVED[kind](*numbers), prompt
        kinds[kind] += 1
    assert set(kinds) == set(KINDS)
    assert min(kinds.values()) > 20


def test_answers_to_search_questions_follow_from_the_corpus(folders):
    facts = {}
    for line in (folders["search"] / "corpus.jsonl").read_text().splitlines():
        relation, name, value = re.fullmatch(r"The (\w+) of (.+) is (.+)\.", json.loads(line)["text"]).groups()
        assert facts.setdefault((relation, name), value) == value
    words = {"mother": "mother", "born": "birthplace", "work": "employer", "founded": "founder", "In which": "seat"}
    lengths = Counter()
    for prompt in read_prompts(folders["search"] / "heldout.jsonl"):
        text = prompt.messages[0]["content"]
        (name,) = [name for name in {name for _, name in facts} if name in text]
        asked = [relation for word, relation in words.items() if word in text] + ["mother"] * (text.count("mother") - 1)
        reached = {facts.get((asked[0], name))}
        if len(asked) == 2:
            reached = {facts.get((last, facts.get((first, name)))) for first, last in (asked, asked[::-1])}
        assert prompt.label in reached, text
        assert prompt.metadata["facts"] == len(asked)
        lengths[len(asked)] += 1
    assert lengths == {1: 100, 2: 100}


@pytest.mark.parametrize("name", WRITE)
def test_heldout_questions_are_new_and_the_same_seed_gives_the_same_files(folders, name, tmp_path):
    folder = folders[name]
    heldout = {prompt.messages[0]["content"] for prompt in read_prompts(folder / "heldout.jsonl")}
    known = {prompt.messages[0]["content"] for prompt in read_prompts(folder / "train.jsonl")}
    known |= {conversation.messages[1]["content"] for conversation in read_conversations(folder / "sft.jsonl")}
    assert not heldout & known
    if name == "search":
        people = {match for text in heldout for match in re.findall(r"[A-Z]\w+ [A-Z]\w+", text)}
        assert len(people) > 20
        assert not any(person in text for person in people for text in known)
    WRITE[name](tmp_path / "again", seed=0, **COUNTS)
    WRITE[name](tmp_path / "other", seed=1, **COUNTS)
    for file in ("train.jsonl", "heldout.jsonl", "sft.jsonl"):
        assert (tmp_path / "again" / file).read_bytes() == (folder / file).read_bytes()
        assert (tmp_path / "other" / file).read_bytes() != (folder / file).read_bytes()


def test_some_demonstrations_of_every_python_kind_are_right_and_most_are_not(folders, tmp_path):
    right, of_kind = Counter(), Counter()
    for conversation in read_conversations(folders["python"] / "sft.jsonl"):
        text = conversation.messages[1]["content"]
        kind = next(kind for kind, one in KINDS.items() if any(text.startswith(t.split("{")[0]) for t in one.texts))
        numbers = numbers_of(text)
        if kind == "sequence" and text.startswith("What"):
            numbers = (numbers[1], numbers[2], numbers[0])
        of_kind[kind] += 1
        right[kind] += answer_of(conversation) == str(SOLVED[kind](*numbers))
    assert set(right) == set(KINDS)
    assert all(0.1 < right[kind] / of_kind[kind] < 0.7 for kind in KINDS)
    assert sum(right.values()) / sum(of_kind.values()) < 0.5


def test_demonstrations_of_searches_are_of_other_facts_than_the_corpus(folders):
    """So that a model cannot learn the facts by heart."""
    folder = folders["search"]
    recipe = yaml.safe_load((RECIPES / "gspo_search.yaml").read_text())
    assert recipe["agent"]["tool_args"]["num_results"] == NUM_RESULTS
    corpus = {json.loads(line)["text"] for line in (folder / "corpus.jsonl").read_text().splitlines()}
    told = []
    for conversation in read_conversations(folder / "sft.jsonl"):
        for message in conversation.messages:
            if message["role"] == "tool":
                passages = message["content"].splitlines()
                assert 1 <= len(passages) <= NUM_RESULTS
                told += passages
    assert len(told) > 800
    assert sum(passage in corpus for passage in told) / len(told) < 0.1
    # Of one fact there are several values, each in other conversations.
    values = Counter(passage.partition(" is ")[0] for passage in set(told))
    assert max(values.values()) > 2


@pytest.mark.parametrize("name", WRITE)
def test_conversations_fit_the_recipe_with_a_tokenizer_of_the_task(folders, name):
    lines = (folders[name] / "sft.jsonl").read_text().splitlines()
    tokenizer = build_tokenizer(lines)
    chat = ChatFormat(ChatTemplate(tokenizer), [tokenizer.eos_token_id])
    conversations = read_conversations(folders[name] / "sft.jsonl")
    assert conversations[0].messages[0] == {"role": "system", "content": SYSTEM_PROMPT}
    lengths = [len(tokens) for c in conversations for tokens, _ in chat.training_sequences(c.messages, c.tools)]
    assert sum(lengths) / len(lengths) < 230
    recipe = yaml.safe_load((RECIPES / f"gspo_{name}.yaml").read_text())
    assert max(lengths) < recipe["rollout"]["max_trajectory_tokens"]
    if name == "search":
        # A name is one token, in a question as in a query.
        person = re.search(r"mother of (\w+ \w+)", lines[0] + lines[1] + lines[2]).group(1)
        assert len(tokenizer.encode(f" {person}")) == 2
