"""The search tool against a plain computation of BM25, and what it answers without a passage."""

import asyncio
import json
import math
import re

import pytest

from slimrl.agent.search import NOTHING, search
from slimrl.agent.tools import ToolBox, ToolCrash

TEXTS = (
    "The mother of Ada Berg is Lena Holt.",
    "Ada Berg works for Nordal, and Nordal pays her.",
    "The founder of Nordal is Lena Holt.",
    "Rivers run to the sea.",
    "Lena Holt was born in Talby, far from the sea.",
)


@pytest.fixture
def corpus(tmp_path):
    file = tmp_path / "corpus.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return str(file)


def bm25(query: str, text: str, k1: float = 1.5, b: float = 0.75) -> float:
    """Lucene's variant, as bm25s's paper has it (arXiv:2407.03618, table 1)."""
    stopwords = {"the", "of", "is", "for", "and", "to", "in", "was"}

    def words(part: str) -> list[str]:
        return [word for word in re.findall(r"\w\w+", part.lower()) if word not in stopwords]

    mean = sum(len(words(one)) for one in TEXTS) / len(TEXTS)
    total = 0.0
    for word in words(query):
        holding, count = sum(word in words(one) for one in TEXTS), words(text).count(word)
        rarity = math.log(1 + (len(TEXTS) - holding + 0.5) / (holding + 0.5))
        total += rarity * count / (count + k1 * (1 - b + b * len(words(text)) / mean))
    return total


@pytest.mark.parametrize("query", ["mother of Ada Berg", "Nordal", "Lena Holt sea", "sea"])
def test_the_best_passages_come_first(corpus, query):
    expected = sorted((text for text in TEXTS if bm25(query, text) > 0), key=lambda text: -bm25(query, text))
    found = search(query, corpus, 4).splitlines()
    assert [round(bm25(query, text), 5) for text in found] == [round(bm25(query, text), 5) for text in expected[:4]]


@pytest.mark.parametrize("query", ["", "zebra", "the", "?"])
def test_a_query_that_shares_no_word_with_a_passage_finds_nothing(corpus, query):
    assert search(query, corpus, 3) == NOTHING


async def test_the_corpus_is_the_recipes_and_a_missing_one_fails_the_trajectory(corpus, tmp_path):
    path = ["slimrl.agent.search:search"]
    box = ToolBox.from_import_paths(path, {"corpus": corpus, "num_results": 1})
    assert list(box.schemas[0]["function"]["parameters"]["properties"]) == ["query"]
    answers = await asyncio.gather(*(box.call("search", {"query": "founder of Nordal"}, 5.0) for _ in range(4)))
    assert {answer.text for answer in answers} == {TEXTS[2]}
    absent = ToolBox.from_import_paths(path, {"corpus": str(tmp_path / "absent.jsonl")})
    with pytest.raises(ToolCrash, match=r"absent\.jsonl: no such file"):
        await absent.call("search", {"query": "x"}, 5.0)
