"""`slimrl-tools synthesize`: its questions are solved again by going through all facts, and its files are read."""

import json
import re
from collections import Counter
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from slimrl_tools.cli import app
from slimrl_tools.synthesis.example import PHRASES
from slimrl_tools.synthesis.filters import names_one
from slimrl_tools.synthesis.graph import Fact, Graph
from slimrl_tools.synthesis.phrases import plain_phrase, read_phrases
from slimrl_tools.synthesis.proof import Proof
from slimrl_tools.synthesis.query import Difference, Entity, Intersection, Projection, Union
from slimrl_tools.synthesis.questions import Question, Questions
from slimrl_tools.synthesis.rendering import Renderer
from slimrl_tools.synthesis.rewriting import says_the_same
from slimrl_tools.synthesis.sampling import MIN_DEPTH
from typer.testing import CliRunner

from slimrl.agent.retrieval.passages import read_corpus, shown_ids
from slimrl.data.prompts import read_prompts
from slimrl.rewards.answers import ExactMatch
from slimrl.rewards.search import Found
from slimrl.rewards.texts import boxed

NUM, HELDOUT = 140, 42


def run(*arguments):
    return CliRunner().invoke(app, [str(one) for one in arguments])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    at = tmp_path_factory.mktemp("synthesis")
    assert run("synthesize", "graph", at / "graph", "--facts", 1500, "--seed", 3).exit_code == 0
    made = synthesize(at, "out")
    assert made.exit_code == 0, made.output
    assert f"{NUM} + {HELDOUT} questions, {NUM + HELDOUT} verified, 0 rewritten" in made.stdout
    return at


def synthesize(at, out, *more):
    return run(
        "synthesize", "questions", at / "graph/graph.jsonl", at / out, "--phrases", at / "graph/phrases.jsonl",
        "--num", NUM, "--heldout", HELDOUT, "--conversations", 60, *more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def triples(folder):
    lines = (folder / "graph/graph.jsonl").read_text().splitlines()
    return [tuple(json.loads(line)[key] for key in ("subject", "relation", "object")) for line in lines]


def prompts(folder, name):
    return read_prompts(folder / "out" / f"{name}.jsonl")


def solved(query, triples):
    """The members of a query as the file has it."""
    match query:
        case {"entity": name}:
            return {name}
        case {"relation": relation, "direction": "forward", "of": of}:
            inner = solved(of, triples)
            return {o for s, r, o in triples if r == relation and s in inner}
        case {"relation": relation, "direction": "backward", "of": of}:
            inner = solved(of, triples)
            return {s for s, r, o in triples if r == relation and o in inner}
        case {"and": parts}:
            return set.intersection(*(solved(part, triples) for part in parts))
        case {"or": parts}:
            return set.union(*(solved(part, triples) for part in parts))
        case {"from": kept, "without": removed}:
            return solved(kept, triples) - solved(removed, triples)


def named(query):
    return set(re.findall(r'"entity": "(.*?)"', json.dumps(query, ensure_ascii=False)))


@pytest.mark.parametrize("name", ["train", "heldout"])
def test_each_question_has_its_one_answer_and_a_proof_of_facts_of_the_graph(folder, triples, name):
    for prompt in prompts(folder, name):
        query, facts = prompt.metadata["query"], [tuple(fact) for fact in prompt.metadata["proof"]]
        assert solved(query, triples) == {prompt.label}
        assert [triples[line - 1] for line in prompt.metadata["provenance"]["lines"]] == facts
        assert prompt.label in solved(query, facts)
        text = prompt.messages[0]["content"]
        found = {one for s, _, o in facts for one in (s, o)} - named(query)
        assert prompt.label in found
        assert [one for one in found if one.lower() in text.lower().replace("the ", "")] == []
        assert all(constant in text for constant in named(query))


def test_each_constraint_alone_leaves_several(folder, triples):
    seen = Counter()
    for prompt in prompts(folder, "train"):
        query, kind = prompt.metadata["query"], prompt.metadata["kind"]
        parts = query.get("and") or query.get("of", {}).get("and") or [query[key] for key in ["from"] if key in query]
        seen[kind] += len(parts) > 0
        whole = query.get("of", {}).get("and") is None
        if whole:
            assert all(len(solved(part, triples)) > 1 for part in parts)
        else:
            assert all(len(solved({**query, "of": part}, triples)) > 1 for part in parts)
    assert {kind for kind, number in seen.items() if number} == set(MIN_DEPTH) - {"chain"}


def test_kinds_and_depths_have_equal_parts_and_no_question_comes_twice(folder):
    both = [*prompts(folder, "train"), *prompts(folder, "heldout")]
    cells = Counter((one.metadata["kind"], one.metadata["depth"]) for one in both)
    assert set(cells) == {(kind, hops) for kind, least in MIN_DEPTH.items() for hops in range(least, 4)}
    assert max(cells.values()) - min(cells.values()) <= 2
    assert len({json.dumps(one.metadata["query"]) for one in both}) == len(both) == NUM + HELDOUT
    assert len({one.messages[0]["content"] for one in both}) == len(both)


def test_what_held_out_questions_ask_for_is_in_no_question_to_train_on(folder):
    answers = {prompt.label for prompt in prompts(folder, "heldout")}
    trained = prompts(folder, "train")
    proofs = {one for prompt in trained for s, _, o in prompt.metadata["proof"] for one in (s, o)}
    assert len(answers) > 10
    assert answers & ({prompt.label for prompt in trained} | proofs) == set()
    assert answers & set().union(*(named(prompt.metadata["query"]) for prompt in trained)) == set()


def test_the_corpus_says_the_facts_and_rewards_take_the_prompts(folder):
    texts = {one.id: one.text for one in read_corpus(folder / "out/corpus.jsonl")}
    for prompt in [*prompts(folder, "train"), *prompts(folder, "heldout")]:
        said = " ".join(texts[one] for one in prompt.metadata["supporting"])
        assert all(s in said and o in said for s, _, o in prompt.metadata["proof"])
        ExactMatch(answer_in="boxed").check_prompt(prompt)
        Found().check_prompt(prompt)


def test_demonstrations_find_all_that_a_question_needs_before_they_answer(folder):
    by_text = {one.messages[0]["content"]: one for one in prompts(folder, "train")}
    lines = [json.loads(line) for line in (folder / "out/sft.jsonl").read_text().splitlines()]
    kinds = set()
    for line in lines:
        prompt = by_text[line["messages"][1]["content"]]
        shown = {one for each in line["messages"] if each["role"] == "tool" for one in shown_ids(each["content"])}
        assert set(prompt.metadata["supporting"]) <= shown
        assert boxed(line["messages"][-1]["content"]) == prompt.label
        kinds.add(prompt.metadata["kind"])
    provenance = json.loads((folder / "out/provenance.json").read_text())
    assert (len(lines), 60 - len(lines)) == (provenance["conversations"], provenance["conversations_left_out"])
    assert kinds == set(MIN_DEPTH)


def test_the_same_seed_gives_the_same_files_and_another_seed_others(folder):
    assert synthesize(folder, "again").exit_code == synthesize(folder, "other", "--seed", 1).exit_code == 0
    for file in sorted((folder / "out").iterdir()):
        assert file.read_bytes() == (folder / "again" / file.name).read_bytes()
    assert (folder / "out/train.jsonl").read_bytes() != (folder / "other/train.jsonl").read_bytes()


BORN_IN = [Projection("birthplace", False, Entity(town)) for town in ("Rome", "Oslo", "Bonn")]
STAFF = Projection("employer", False, Projection("founder", False, Entity("Ann Lee")))
RENDERED = [
    (Projection("founder", True, Entity("Elm Works")), "Who founded Elm Works?"),
    (Projection("seat", True, Projection("owner", True, Entity("Elm Works"))),
     "Which town is the seat of the owner of Elm Works?"),
    (Projection("birthplace", True, Projection("employer", False, Entity("Elm Works"))),
     "Which town is the birthplace of a person who works for Elm Works?"),
    (Intersection((STAFF, BORN_IN[0])), "Who was born in Rome and works for the company that was founded by Ann Lee?"),
    (Intersection((STAFF, Projection("birthplace", False, Projection("seat", True, Entity("Elm Works"))))),
     "Who works for the company that was founded by Ann Lee, and also was born in the seat of Elm Works?"),
    (Intersection((Projection("birthplace", False, Union((Entity("Rome"), Entity("Oslo")))), STAFF)),
     "Who was born in either Oslo or Rome and works for the company that was founded by Ann Lee?"),
    (Difference(STAFF, BORN_IN[0]),
     "Who works for the company that was founded by Ann Lee, but is not a person who was born in Rome?"),
    (Difference(STAFF, Union((BORN_IN[0], BORN_IN[1]))),
     "Who works for the company that was founded by Ann Lee, but is neither a person who was born in Rome nor a person "
     "who was born in Oslo?"),
    (Projection("teacher", True, Intersection((BORN_IN[0], Projection("employer", False, Entity("Elm Works"))))),
     "Who taught the person who both was born in Rome and works for Elm Works?"),
    (Difference(Projection("birthplace", True, STAFF), Projection("seat", True, Entity("Elm Works"))),
     "Which town is the birthplace of a person who works for the company that was founded by Ann Lee, but is not the "
     "seat of Elm Works?"),
]  # fmt: skip


@pytest.mark.parametrize(("query", "text"), RENDERED)
def test_questions_in_english(query, text):
    facts = [
        ("Elm Works", "founder", "Ann Lee"), ("Elm Works", "owner", "Oak Bank"), ("Oak Bank", "seat", "Rome"),
        ("Elm Works", "seat", "Bonn"), *((name, "employer", "Elm Works") for name in ("Bo Day", "Cy Fox")),
        ("Bo Day", "birthplace", "Rome"), ("Cy Fox", "birthplace", "Bonn"),
    ]  # fmt: skip
    assert Renderer(Graph([Fact(*fact) for fact in facts]), PHRASES).question(query) == text


def test_a_relation_without_a_phrase_is_said_by_its_name():
    graph = Graph([Fact("France", "capital_city", "Paris")])
    renderer = Renderer(graph, {"capital_city": plain_phrase("capital_city")})
    assert (
        renderer.question(Projection("capital_city", True, Entity("France"))) == "What is the capital city of France?"
    )
    assert (
        renderer.question(Projection("capital_city", False, Entity("Paris"))) == "What has as its capital city Paris?"
    )


def test_names_are_found_as_whole_words_without_regard_to_case():
    assert names_one("Who founded the ELM works?", ["Elm Works"])
    assert not names_one("Who founded Elm Workshop?", ["Elm Works"])


def test_names_that_the_reward_takes_for_the_same_are_no_answers():
    facts = [("a", "r", "The Elm"), ("b", "r", "Elm"), ("c", "r", "None"), ("d", "r", "Oak"), ("e", "r", "x{y")]
    assert Graph([Fact(*fact) for fact in facts]).answerable == ["Oak", "a", "b", "c", "d", "e"]


GOOD = '{"subject": "a", "relation": "r", "object": "b"}'


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"subject": "a", "relation": "r"}', '"object" is missing; write a text'),
        ('{"subject": "a", "relation": "r", "object": 1834}', '"object" is 1834; write a text'),
        ('{"subject": " a", "relation": "r", "object": "c"}', "\"subject\" is ' a'; a text has single blanks"),
        ('{"subject": "a", "relation": "r", "object": "c", "source": "x"}', "has the unknown key 'source'"),
        (GOOD, "repeats the fact of line 1"),
        ("[]", "must be a JSON object"),
    ],
)
def test_a_line_that_is_no_fact_is_named(tmp_path, line, problem):
    file = tmp_path / "graph.jsonl"
    file.write_text(f"{GOOD}\n\n{line}\n")
    refused = run("synthesize", "questions", file, tmp_path / "out")
    assert (refused.exit_code, refused.stderr.startswith(f"{file}:3: {problem}")) == (2, True), refused.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ({"relation": "q", "noun": "q of {}", "subject_is": "q {}"}, "relation 'q' is not in the graph"),
        ({"relation": "r", "noun": "r of {}"}, '"subject_is" is missing'),
        ({"relation": "r", "noun": "r", "subject_is": "r {}"}, "\"noun\" is 'r'; it has {} once"),
        ({"relation": "r", "noun": "r of {}", "subject_is": 3}, '"subject_is" is not a text'),
        ({"relation": "r", "verb": "r"}, "has the unknown key 'verb'"),
        (
            {"relation": "r", "noun": "mouth of the {}", "subject_is": "r {}"},
            "\"noun\" is 'mouth of the {}': 'the' would",
        ),
        ({"relation": "r", "noun": "r of {}", "subject_is": "has a {}"}, "\"subject_is\" is 'has a {}': 'a' would"),
    ],
)
def test_a_line_that_is_no_phrase_is_named(tmp_path, line, problem):
    file = tmp_path / "phrases.jsonl"
    file.write_text(json.dumps(line))
    with pytest.raises(ValueError, match=re.escape(f"{file}:1: {problem}")):
        read_phrases(file, ["r"])


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--kinds", "chain,walk"], "--kinds: 'walk' is none of chain, intersection, union, negation, projection"),
        (["--kinds", "chain,chain"], "--kinds: names a kind twice"),
        (["--depth", 1], "--depth 1: questions of kind projection have 2 hops or more"),
        (["--kinds", "chain", "--depth", 1, "--num", 9000], "of 9000 ones of kind chain and depth 1 were found"),
        (["--rewrite-url", "http://localhost:1/v1"], "--rewrite-url and --rewrite-model: both are needed"),
    ],
)
def test_options_that_do_not_fit_are_refused_and_nothing_is_left(folder, options, problem, monkeypatch):
    monkeypatch.setattr("slimrl_tools.synthesis.questions.MAX_TRIES", 300)
    refused = synthesize(folder, "new", *options)
    assert refused.exit_code == 2
    assert problem in refused.stderr
    assert not (folder / "new").exists()


def test_an_answer_in_which_the_solvers_differ_is_a_failure(folder, monkeypatch):
    monkeypatch.setattr("slimrl_tools.synthesis.solver.Solver.answers", lambda self, query: {"nobody"})
    failed = synthesize(folder, "new")
    assert failed.exit_code == 1
    assert "but the second solver has {'nobody'}" in failed.stderr
    assert not (folder / "new").exists()


WITHOUT_ROME = Question(
    kind="negation", query=Difference(STAFF, BORN_IN[0]), answer="Cy Fox", text=RENDERED[6][1],
    proof=Proof((), frozenset(("Elm Works", "Cy Fox", "Bo Day"))),
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("Ann Lee founded a company. Which of those working there was not born in Rome?", True),
        ("ann lee founded a company. Which worker there has a birthplace other than Rome?", True),
        ("She founded a company. Which of those working there was not born in Rome?", False),
        ("Ann Lee founded a company. Which of those working there was born in Rome?", False),
        ("Ann Lee founded a company. Who there was not born in Rome?", False),
        ("Ann Lee founded Elm Works. Which of those working there was not born in Rome?", False),
        ("Ann Lee founded a company. Cy Fox, working there, was not born in Rome?", False),
        ("Ann Lee founded a company, and one of those working there was not born in Rome.", False),
        ("Ann Lee founded a company. Which of those working there was not born in Rome?" + " Really?" * 30, False),
    ],
)
def test_other_words_that_say_something_else_are_not_taken(text, same):
    assert says_the_same(text, WITHOUT_ROME, PHRASES) is same


def test_a_word_within_a_name_says_no_relation():
    staff = Projection("employer", False, Entity("Elm Works"))
    question = Question(
        kind="chain", query=staff, answer="Bo Day", text="Who works for Elm Works?", proof=Proof((), frozenset())
    )
    assert says_the_same("Who is working at Elm Works?", question, PHRASES)
    assert not says_the_same("Whom does Elm Works like?", question, PHRASES)


class _Model(BaseHTTPRequestHandler):
    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = request["messages"][0]["content"].splitlines()[-1]
        # A third of the questions lose their names.
        said = "Who is it?" if len(question) % 3 == 0 else f"Hm.\n**Tell me: {question}**"
        answer = {"choices": [{"message": {"content": said}}]} if request["model"] == "policy" else {}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def model_url():
    server = HTTPServer(("127.0.0.1", 0), _Model)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()
    thread.join(10)


def test_a_model_says_questions_in_other_words_where_it_keeps_their_names(folder, model_url):
    few = ("--num", 28, "--heldout", 14, "--conversations", 0)
    made = synthesize(folder, "words", *few, "--rewrite-url", model_url, "--rewrite-model", "policy")
    assert (made.exit_code, synthesize(folder, "plain", *few).exit_code) == (0, 0), made.output
    before, after = read_prompts(folder / "plain/train.jsonl"), read_prompts(folder / "words/train.jsonl")
    kept = 0
    for old, new in zip(before, after, strict=True):
        (was,), (now,) = old.messages, new.messages
        lost = len(was["content"]) % 3 == 0
        assert now["content"] == (was["content"] if lost else f"Tell me: {was['content']}")
        assert new.metadata["provenance"]["text"] == ("template" if lost else "rewritten")
        assert (old.label, old.metadata["query"]) == (new.label, new.metadata["query"])
        kept += lost
    assert 0 < kept < 28
    refused = synthesize(folder, "none", *few, "--rewrite-url", model_url, "--rewrite-model", "other")
    assert (refused.exit_code, "--rewrite-url: the answer is no chat completion" in refused.stderr) == (2, True)


def test_a_graph_without_two_answers_is_refused():
    graph = Graph([Fact("a", "r", "A")])
    with pytest.raises(ValueError, match="fewer than two entities that can be answers"):
        Questions(graph, Renderer(graph, {"r": plain_phrase("r")}), rng=None)
