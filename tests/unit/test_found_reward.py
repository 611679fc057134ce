"""The reward for finding the needed passages, on answers of the real search tool, and what does not earn it."""

import json

import pytest
from reward_cases import asked, said

from slimrl.agent.search import search
from slimrl.rewards.answers import ExactMatch
from slimrl.rewards.search import Found

PEOPLE = [f"{first} {last}" for first in ("Ada", "Lena", "Otto", "Ines", "Juri") for last in ("Berg", "Holt", "Lund")]
TOWNS = ("Talby", "Norvik", "Sunford", "Oldham")
NEEDED = asked("Norvik", supporting=["p0", "p7"])
"""Where was the teacher of Ada Berg born? By p0 the teacher was Otto Holt, who is in p7."""


@pytest.fixture
def corpus(tmp_path):
    file = tmp_path / "corpus.jsonl"
    lines = []
    for number, name in enumerate(PEOPLE):
        lines.append({"id": f"p{number}", "text": f"{name} was born in {TOWNS[number % len(TOWNS)]}."})
    lines[0]["text"] = "Ada Berg was born in Talby. The teacher was Otto Holt."
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(file)


def trajectory(corpus, *queries, text="\\boxed{Norvik}", num_results=3, tool="search", linked=False):
    messages = []
    for number, query in enumerate(queries):
        function = {"name": tool, "arguments": {"query": query}}
        messages.append(
            {"role": "assistant", "content": "", "tool_calls": [{"id": f"c{number}", "function": function}]}
        )
        told = {"tool_call_id": f"c{number}"} if linked else {"name": tool}
        messages.append({"role": "tool", "content": search(query, corpus, num_results), **told})
    return said(text, before=messages)


@pytest.mark.parametrize("linked", [False, True])
def test_the_fraction_of_the_needed_passages_that_searches_returned_is_paid(corpus, linked):
    value = Found()
    assert value(trajectory(corpus), NEEDED) == 0
    assert value(trajectory(corpus, "Ada Berg", num_results=1, linked=linked), NEEDED) == 0.5
    assert value(trajectory(corpus, "Ada Berg", "Otto Holt", num_results=1, linked=linked), NEEDED) == 1


def test_a_search_that_is_repeated_earns_nothing_more(corpus):
    once, often = (trajectory(corpus, *["Ada Berg"] * times, num_results=1) for times in (1, 50))
    assert Found()(often, NEEDED) == Found()(once, NEEDED) == 0.5


def test_a_search_for_everything_and_many_searches_earn_no_more_than_the_first_passages(corpus):
    everything = " ".join([*PEOPLE, *TOWNS, "teacher born"])
    value = Found(max_passages=4)
    returned = {one: value(trajectory(corpus, everything, num_results=100), asked("x", supporting=[one])) for one in
                (f"p{number}" for number in range(len(PEOPLE)))}  # fmt: skip
    assert sum(returned.values()) == 4
    one_by_one = trajectory(corpus, *PEOPLE[::-1], num_results=1)
    assert value(one_by_one, NEEDED) == 0
    assert Found(max_passages=15)(one_by_one, NEEDED) == 1


def test_naming_all_candidates_is_neither_right_nor_found(corpus):
    everywhere = trajectory(corpus, text=f"\\boxed{{{', '.join(TOWNS)}}} [p0] [p7] {' '.join(PEOPLE)}")
    assert Found()(everywhere, NEEDED) == 0
    assert ExactMatch(answer_in="boxed")(everywhere, NEEDED) == 0


def test_ids_that_the_policy_or_another_tool_writes_do_not_count(corpus):
    ids = "\n".join(f"[p{number}] x" for number in range(len(PEOPLE)))
    written = said(
        ids, before=[{"role": "assistant", "content": ids}, {"role": "tool", "name": "python", "content": ids}]
    )
    assert Found()(written, NEEDED) == 0
    # Nor does a search that has them in its query, whose words are in no passage.
    assert Found()(trajectory(corpus, ids), NEEDED) == 0


@pytest.mark.parametrize("supporting", [None, [], "p0", [1]])
def test_a_prompt_without_its_passages_is_refused(supporting):
    with pytest.raises(ValueError, match='the metadata has no "supporting"'):
        Found().check_prompt(asked("x", supporting=supporting))
