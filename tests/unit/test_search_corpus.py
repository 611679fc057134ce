"""Questions over a corpus of made-up entities: each is solved from the words of the passages alone."""

import json
import re
from collections import Counter, defaultdict

import pytest
from slimrl_tools.cli import app
from slimrl_tools.search.questions import HOPS, SHARES
from slimrl_tools.search.search_corpus import write_search_corpus
from typer.testing import CliRunner

from slimrl.agent.retrieval.bm25 import KIND, MADE_WITH, Bm25Index
from slimrl.agent.retrieval.corpus_index import folder_of, index_problem
from slimrl.agent.retrieval.passages import read_corpus, shown_ids
from slimrl.data.prompts import read_prompts

COUNTS = {"num_passages": 3000, "num_train": 400, "num_heldout": 120}
N = r"((?:[A-Z][\w]*|of|and)(?: (?:[A-Z]\w*|of|and))*)"
"""A name"""
SAID = {
    "birthplace": rf"(?:was born in|came into the world in|is a native of) {N}\.|{N} was the childhood home",
    "born": r"give (\d+) as the year of birth|born in the year (\d+)|light of day in (\d+)",
    "employer": rf"(?:works for|on the payroll of|earns a living at) {N}\.|had a post at {N} ever since",
    "teacher": rf"(?:learned the trade from|was a pupil of|was taught by) {N}\.|lessons of {N} were decisive",
    "school": rf"(?:studied at|graduated from|spent four years at) {N}\.",
    "founder": rf"(?:was founded by|goes back to|started in a shed by) {N}\.|{N} set up the firm",
    "seat": rf"(?:has its seat in|head office is in|is run from) {N}\.",
    "owner": rf"(?:belongs to|was bought by|shares are held by) {N}\.",
    "founded": r"(?:was founded in|opened its doors in|first ledger is of) (\d+)",
    "mayor": rf"(?:mayor is|is governed by) {N}\.|{N} presides over the town council",
    "namesake": rf"(?:is named after|name honours|renamed in memory of) {N}\.",
    "charter": r"(?:got its charter in|been a town since|rights were granted in) (\d+)",
    "place": rf"(?:stands in|buildings are in|campus on a hill in) {N}\.",
    "head": rf"(?:is headed by|present head is) {N}\.|{N} has been in charge",
    "author": rf"(?:was written by|best known work of) {N}\.|{N} is the author",
    "publisher": rf"(?:was published by|came out with) {N}\.|{N} printed the first edition",
    "published": r"(?:was published in|appeared in|first edition is of) (\d+)",
}
"""How a passage says a fact"""
ASKED = [
    (r"In which town was (.+) born\?|the town where (.+) was born", "birthplace"),
    (r"In which year was (.+) born\?", "born"),
    (r"Which company does (.+) work for\?|the company that (.+) works for", "employer"),
    (r"Who was the teacher of (.+)\?|the teacher of (.+)", "teacher"),
    (r"At which school did (.+) study\?|the school where (.+) studied", "school"),
    (r"Who founded (.+)\?|the founder of (.+)", "founder"),
    (r"In which town does (.+) have its seat\?|the town where (.+) has its seat", "seat"),
    (r"Which company owns (.+)\?|the company that owns (.+)", "owner"),
    (r"In which year was (.+) founded\?", "founded"),
    (r"Who is the mayor of (.+)\?|the mayor of (.+)", "mayor"),
    (r"After whom is (.+) named\?|the person after whom (.+) is named", "namesake"),
    (r"In which year did (.+) get its charter\?", "charter"),
    (r"In which town does (.+) stand\?|the town where (.+) stands", "place"),
    (r"Who is the head of (.+)\?|the head of (.+)", "head"),
    (r"Who wrote (.+)\?|the author of (.+)", "author"),
    (r"Which company published (.+)\?|the publisher of (.+)", "publisher"),
    (r"In which year was (.+) published\?", "published"),
]
EARLIER = {"Who was born": "born", "Which company was founded": "founded", "Which town got its charter": "charter",
           "Which book was published": "published"}  # fmt: skip
SHARED = {"was born in": "birthplace", "studied at": "school", "works for": "employer"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("search") / "data"
    write_search_corpus(out, seed=0, **COUNTS)
    return out


@pytest.fixture(scope="module")
def facts(folder):
    """Name -> id and facts, read from the passages."""
    found = {}
    for line in (folder / "corpus.jsonl").read_text().splitlines():
        passage = json.loads(line)
        text = passage["text"]
        name = re.match(rf"(?:The [a-z]+ )?{N}(?:,| is | lies | has a )", text)[1]
        assert name not in found
        known = {relation: next(filter(None, match.groups())) for relation, pattern in SAID.items()
                 if (match := re.search(pattern, text))}  # fmt: skip
        found[name] = {"id": passage["id"], **known}
    return found


def solved(text, facts, used):
    """The answers to a question or to a part of it; `used` gets the passages."""
    if text in facts:
        return {text}
    answers = set()
    for pattern, relation in ASKED:
        if match := re.fullmatch(pattern, text):
            for name in solved(next(filter(None, match.groups())), facts, used):
                if relation in facts[name]:
                    used.append(facts[name]["id"])
                    answers.add(facts[name][relation])
    return answers


def all_answers(text, facts):
    used = []
    if match := re.fullmatch(r"(.+) first, (.+) or (.+)\?", text):
        pair = sorted(match.group(2, 3), key=lambda name: int(facts[name][EARLIER[match[1]]]))
        return {pair[0]}, [facts[name]["id"] for name in match.group(2, 3)]
    if match := re.fullmatch(rf"Who ({'|'.join(SHARED)}) (.+) and ({'|'.join(SHARED)}) (.+)\?", text):
        wanted = {SHARED[match[1]]: match[2], SHARED[match[3]]: match[4]}
        answers = {name for name, known in facts.items() if wanted.items() <= known.items()}
        return answers, [facts[name]["id"] for name in answers]
    return solved(text, facts, used), used


def test_every_question_has_one_answer_which_follows_from_its_passages(folder, facts):
    kinds = Counter()
    for file in ("train.jsonl", "heldout.jsonl"):
        for prompt in read_prompts(folder / file):
            answers, used = all_answers(prompt.messages[0]["content"], facts)
            assert answers == {prompt.label}, prompt
            assert used == prompt.metadata["supporting"], prompt
            assert len(used) == prompt.metadata["hops"] == HOPS[prompt.metadata["kind"]]
            kinds[prompt.metadata["kind"]] += 1
    assert kinds.keys() == SHARES.keys()
    assert all(abs(kinds[kind] / 520 - share) < 0.07 for kind, share in SHARES.items())


def test_all_facts_of_an_entity_are_in_its_passage(facts):
    counts = Counter(len(known) - 1 for known in facts.values())
    # Five of a person, four of a company, three of the others but two of a school.
    assert counts == {5: 1800, 4: 450, 3: 450 + 180, 2: 120}


def test_heldout_questions_are_about_other_entities(folder, facts):
    def entities(file):
        found = set()
        ids = {known["id"]: name for name, known in facts.items()}
        for prompt in read_prompts(folder / file):
            found |= {ids[one] for one in prompt.metadata["supporting"]} | ({prompt.label} & facts.keys())
        return found

    heldout = entities("heldout.jsonl")
    assert len(heldout) > 200
    assert not heldout & entities("train.jsonl")


def test_the_same_seed_gives_the_same_files(folder, tmp_path):
    for name, seed, same in (("again", 0, True), ("other", 1, False)):
        write_search_corpus(tmp_path / name, seed=seed, **COUNTS)
        for file in ("corpus.jsonl", "train.jsonl", "heldout.jsonl"):
            assert ((tmp_path / name / file).read_bytes() == (folder / file).read_bytes()) is same


def test_the_words_of_a_question_do_not_find_all_it_needs_and_searches_for_names_find_more(folder, facts):
    index = Bm25Index.build(read_corpus(folder / "corpus.jsonl"))
    names = {known["id"]: name for name, known in facts.items()}
    at_once, by_name = defaultdict(list), []
    for prompt in read_prompts(folder / "heldout.jsonl"):
        needed = set(prompt.metadata["supporting"])
        found = set(shown_ids("\n".join(index.find(prompt.messages[0]["content"], 3))))
        at_once[prompt.metadata["kind"]].append(len(needed & found) / len(needed))
        by_name += [one in shown_ids("\n".join(index.find(names[one], 3))) for one in needed]
    mean = {kind: sum(values) / len(values) for kind, values in at_once.items()}
    assert 0.3 < mean["one"] < 0.99
    assert mean["three"] < mean["two"] < 0.6
    assert sum(by_name) / len(by_name) > 0.85


@pytest.mark.parametrize(
    ("count", "problem"), [(50, "50 passages are too few"), (150, "too few for so many questions")]
)
def test_too_few_passages_are_refused_and_nothing_is_left(tmp_path, count, problem):
    with pytest.raises(ValueError, match=problem):
        write_search_corpus(tmp_path / "out", seed=0, num_passages=count, num_train=400, num_heldout=120)
    assert not list(tmp_path.iterdir())


def test_the_commands_write_the_corpus_and_its_index_and_refuse_what_does_not_fit(tmp_path):
    def run(*arguments):
        return CliRunner().invoke(app, [str(one) for one in arguments])

    made = run("search-data", tmp_path / "out", "--passages", 300, "--num-train", 20, "--num-heldout", 5)
    assert (made.exit_code, made.stdout) == (0, f"{tmp_path / 'out'}: 300 passages, 20 + 5 questions\n")
    corpus = tmp_path / "out" / "corpus.jsonl"
    assert run("search-index", corpus).exit_code == 0
    assert index_problem(folder_of(corpus, KIND), corpus, MADE_WITH) is None
    for arguments, said in (
        (["search-data", tmp_path / "new", "--passages", 300, "--num-conversations", 5], "leave --passages out"),
        (["search-index", tmp_path / "absent.jsonl"], "absent.jsonl: no such file"),
    ):
        refused = run(*arguments)
        assert refused.exit_code == 2
        assert said in refused.stderr
    assert sorted(one.name for one in tmp_path.iterdir()) == ["out"]
