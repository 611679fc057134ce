"""benchmarks/synthesis_data.py: questions over one graph, and demonstrations of others that fit a tiny model."""

import importlib
import json
import re
from pathlib import Path

import pytest
import yaml
from slimrl_tools.synthesis.demonstrations import NUM_RESULTS
from slimrl_tools.toy.toy_tokenizer import build_tokenizer

from slimrl.agent.chat.chat_format import ChatFormat
from slimrl.agent.chat.template import ChatTemplate
from slimrl.data.prompts import read_conversations, read_prompts

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("synthesis") / "data"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        made = importlib.import_module("synthesis_data")
    made.write_synthesis_data(out, seed=1, num=60, heldout=20, conversations=250)
    return out


def test_demonstrations_show_what_they_answer_and_are_of_other_facts_than_the_corpus(folder):
    assert [len(read_prompts(folder / f"{name}.jsonl")) for name in ("train", "heldout")] == [60, 20]
    sentences = re.compile(r"[^.\]]+\.")
    corpus = {said.strip() for line in (folder / "corpus.jsonl").open() for said in sentences.findall(line)}
    told = set()
    conversations = read_conversations(folder / "sft.jsonl")
    assert len(conversations) == 250
    for one in conversations:
        shown = " ".join(message["content"] for message in one.messages if message["role"] == "tool")
        assert re.search(r"\\boxed\{(.*)\}", one.messages[-1]["content"]).group(1) in shown
        told |= {said.strip() for said in sentences.findall(shown)}
    assert len(told) > 300
    assert len(told & corpus) / len(told) < 0.1


def test_demonstrations_fit_the_recipe_with_a_tokenizer_of_their_words(folder):
    recipe = yaml.safe_load((ROOT / "recipes/tiny_moe/gspo_synthesis.yaml").read_text())
    assert recipe["agent"]["tool_args"]["num_results"] == NUM_RESULTS
    whole = yaml.safe_load((ROOT / "recipes/tiny_moe" / recipe["extends"]).read_text())
    tokenizer = build_tokenizer((folder / "sft.jsonl").read_text().splitlines())
    chat = ChatFormat(ChatTemplate(tokenizer), [tokenizer.eos_token_id])
    conversations = read_conversations(folder / "sft.jsonl")
    lengths = [len(tokens) for one in conversations for tokens, _ in chat.training_sequences(one.messages, one.tools)]
    assert max(lengths) < whole["rollout"]["max_trajectory_tokens"]
    answers = [json.loads(line)["label"] for line in (folder / "heldout.jsonl").open()]
    # The last word of a name is one token, or two where demonstrations hardly say it.
    assert all(len(tokenizer.encode(f" {answer.split()[-1]}")) <= 2 for answer in answers)
