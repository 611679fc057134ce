"""`slimrl-tools synthesize forward`: answers are found again from the words of questions, and the files are read."""

import json
import re
import threading
from collections import Counter
from fractions import Fraction
from functools import cache
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from random import Random

import pytest
from slimrl_tools.cli import app
from slimrl_tools.synthesis.forward.execution import Executor
from slimrl_tools.synthesis.forward.plan import Plan, Step
from slimrl_tools.synthesis.forward.proposals import read_plan
from slimrl_tools.synthesis.forward.tasks import Task, Tasks
from slimrl_tools.toy.search_data import World, make_names
from slimrl_tools.toy.toy_configs import ToySize, toy_config
from slimrl_tools.toy.toy_tokenizer import build_tokenizer
from typer.testing import CliRunner

from slimrl.cli import app as slimrl
from slimrl.config.schema.agent import AgentConfig
from slimrl.data.prompts import read_conversations, read_prompts

RECIPES = Path(__file__).parents[2] / "recipes"
CALCULATOR = "slimrl.agent.calculator:calculator"
NUM, HELDOUT, DEPTH = 90, 30, 3
OPERATIONS = {"sum": "+", "product": "*", "difference": "-", "quotient": "/"}


def operation(name, symbol, low=2):
    number = {"integer": [low, 60], "of": "number"}
    return {
        "tool": "calculator", "arguments": {"expression": f"({{a}}) {symbol} ({{b}})"}, "gives": "number",
        "slots": {"a": number, "b": number}, "says": f"the {name} of {{a}} and {{b}}",
    }  # fmt: skip


def write(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def forward(*arguments):
    return CliRunner().invoke(app, ["synthesize", "forward", *map(str, arguments)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    at = tmp_path_factory.mktemp("forward")
    steps = write(at / "steps.jsonl", *(operation(name, symbol) for name, symbol in list(OPERATIONS.items())[:3]))
    counts = ("--num", NUM, "--heldout", HELDOUT, "--conversations", 40, "--depth", DEPTH)
    made = forward(RECIPES / "tiny_moe/gspo_calculator.yaml", at / "out", "--steps", steps, *counts)
    assert made.exit_code == 0, made.output
    assert f"{NUM} + {HELDOUT} tasks, 40 conversations" in made.stdout
    assert forward(CALCULATOR, at / "again", "--steps", steps, *counts).exit_code == 0
    return at


def value(words):
    """Value of what stands at the beginning of a list of words, which are taken away."""
    word = words.pop(0)
    if word != "the":
        return Fraction(word)
    symbol = OPERATIONS[words.pop(0)]
    assert words.pop(0) == "of"
    left = value(words)
    assert words.pop(0) == "and"
    return eval(f"left {symbol} right", {"left": left, "right": value(words)})


def tasks(folder, name):
    return read_prompts(folder / "out" / f"{name}.jsonl")


@pytest.mark.parametrize("name", ["train", "heldout"])
def test_each_answer_is_the_value_of_the_questions_words(folder, name):
    for prompt in tasks(folder, name):
        words = re.fullmatch(r"What is (.*)\?", prompt.messages[0]["content"]).group(1).split()
        assert value(words) == Fraction(prompt.label)
        assert words == []
        assert prompt.label == prompt.metadata["plan"][-1]["result"]


def test_numbers_of_calls_have_equal_parts_and_nothing_that_is_asked_stands_in_the_question(folder):
    both = {name: tasks(folder, name) for name in ("train", "heldout")}
    for prompts in both.values():
        assert set(Counter(one.metadata["calls"] for one in prompts).values()) == {len(prompts) // DEPTH}
    everything = [*both["train"], *both["heldout"]]
    assert len({one.messages[0]["content"] for one in everything}) == len(everything) == NUM + HELDOUT
    for prompt in everything:
        numbers = set(re.findall(r"\d+", prompt.messages[0]["content"]))
        assert numbers & {call["result"] for call in prompt.metadata["plan"]} == set()


def test_no_task_to_train_on_makes_the_last_call_of_a_held_out_one(tmp_path):
    few = {"integer": [2, 12], "of": "number"}
    steps = write(tmp_path / "steps.jsonl", {**operation("sum", "+"), "slots": {"a": few, "b": few}})
    made = forward(CALCULATOR, tmp_path / "out", "--steps", steps, "--num", 60, "--heldout", 40, "--depth", 2)
    assert made.exit_code == 0, made.output
    assert json.loads((tmp_path / "out/provenance.json").read_text())["left_out"]["held out"] > 0

    def calls(prompt):
        return [json.dumps([one["tool"], one["arguments"]]) for one in prompt.metadata["plan"]]

    last = {calls(prompt)[-1] for prompt in tasks(tmp_path, "heldout")}
    assert last & {call for prompt in tasks(tmp_path, "train") for call in calls(prompt)} == set()


def test_the_same_seed_gives_the_same_files_from_a_recipe_and_from_its_tools(folder):
    for name in ("train", "heldout", "sft"):
        assert (folder / f"out/{name}.jsonl").read_bytes() == (folder / f"again/{name}.jsonl").read_bytes()


def test_a_start_takes_the_prompts_and_the_conversations(folder, tmp_path):
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    config = toy_config("qwen3_moe", ToySize()) | {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for recipe, files, said in (
        ("gspo_calculator", {"train": "train", "eval.heldout": "heldout"}, f"data.train: {NUM} prompts"),
        ("sft", {"train": "sft"}, "data.train: 40 examples"),
    ):
        settings = [f"data.{key}={folder}/out/{file}.jsonl" for key, file in files.items()]
        more = ["sft.max_tokens=1000"] if recipe == "sft" else []
        command = ["config", "check", f"{RECIPES}/tiny_moe/{recipe}.yaml", f"model.path={tmp_path}", *settings, *more]
        checked = CliRunner().invoke(slimrl, [*command, "--data"])
        assert checked.exit_code == 0, checked.output
        assert said in checked.output
    for told in read_conversations(folder / "out/sft.jsonl"):
        asked = [c["function"]["arguments"]["expression"] for m in told.messages for c in m.get("tool_calls", ())]
        heard = [message["content"] for message in told.messages if message["role"] == "tool"]
        assert [Fraction(eval(one)) for one in asked] == [Fraction(one) for one in heard]


def test_searches_over_a_synthesised_corpus_answer_as_its_graph_does(tmp_path):
    rng = Random(0)
    names = make_names(rng)
    facts = World(names, rng).facts
    graph = [{"subject": of, "relation": name, "object": what} for (name, of), what in facts.items()]
    write(tmp_path / "graph.jsonl", *graph)
    command = ["synthesize", "questions", tmp_path / "graph.jsonl", tmp_path / "q", "--kinds", "chain", "--depth", "1",
               "--num", 4, "--heldout", 2]  # fmt: skip
    made = CliRunner().invoke(app, list(map(str, command)))
    assert made.exit_code == 0, made.output

    def hop(relation, kind, gives):
        slot = {"values": names[kind], "of": kind}
        return {
            "tool": "search", "arguments": {"query": f"{relation} of {{x}}"}, "slots": {"x": slot}, "gives": gives,
            "says": f"the {relation} of {{x}}", "result": f"{{x}} has as its {relation} {{}}.",
        }  # fmt: skip

    kinds = {"mother": ("person", "person"), "employer": ("person", "company"), "founder": ("company", "person")}
    steps = write(tmp_path / "steps.jsonl", *(hop(name, *ends) for name, ends in kinds.items()))
    corpus = json.dumps({"corpus": str(tmp_path / "q/corpus.jsonl")})
    made = forward("slimrl.agent.search:search", tmp_path / "out", "--tool-args", corpus, "--steps", steps,
                   "--num", 30, "--heldout", 10, "--depth", 2)  # fmt: skip
    assert made.exit_code == 0, made.output
    for prompt in [*tasks(tmp_path, "train"), *tasks(tmp_path, "heldout")]:
        said = re.fullmatch(r"What is the (\w+) of (?:the (\w+) of )?(.*)\?", prompt.messages[0]["content"])
        last, first, name = said.groups()
        assert prompt.label == facts[last, name if first is None else facts[first, name]]
        assert prompt.metadata["calls"] == 1 + (first is not None)


TOOLS = '''
import itertools, time

COUNT = itertools.count()

def double(number: int) -> int:
    """Double a number.

    Args:
        number: Any.
    """
    return 2 * number

def parity(number: int) -> str:
    """Say whether a number is even.

    Args:
        number: Any.
    """
    return "even" if number % 2 == 0 else "odd"

def count(number: int) -> int:
    """Count calls.

    Args:
        number: Any.
    """
    return 1000 + next(COUNT)

def sleep(number: int) -> int:
    """Wait.

    Args:
        number: Any.
    """
    time.sleep(0.5)
    return number + 1000
'''


@pytest.fixture
def judged(tmp_path, monkeypatch):
    """What becomes of a plan of some steps, each of a tool, its argument and its inputs."""
    (tmp_path / "forward_tools.py").write_text(TOOLS)
    monkeypatch.syspath_prepend(tmp_path)
    names = ("double", "parity", "count", "sleep")
    agent = AgentConfig(tools=[*(f"forward_tools:{name}" for name in names), CALCULATOR])
    with Executor(agent, 0.1) as executor:

        def judge(*steps, says="it"):
            made = [
                Step(tool=tool, says=says, inputs=tuple(inputs),
                     arguments={"expression" if tool == "calculator" else "number": argument})
                for tool, argument, *inputs in steps
            ]  # fmt: skip
            found = Tasks(None, executor, Random(0))._task(Plan(steps=tuple(made)), heldout=False)
            return found.answer if isinstance(found, Task) else found

        yield judge


@pytest.mark.parametrize(
    ("steps", "found"),
    [
        ([("double", "21", "21")], "42"),
        ([("double", "21", "21"), ("double", "{#1}", "{#1}")], "84"),
        ([("double", 21), ("calculator", "{#1} / 8", "{#1}")], "5.25"),
        ([("double", "21"), ("double", "4")], "superfluous step"),
        # The parity of 22 is that of its double.
        ([("double", "22", "22"), ("parity", "{#1}", "{#1}")], "superfluous step"),
        ([("double", "21", "21"), ("parity", "{#1}", "{#1}")], "even"),
        ([("double", "21", "21"), ("calculator", "{#1} * 1", "{#1}")], "superfluous step"),
        ([("count", "1")], "another answer when asked again"),
        ([("sleep", "1")], "failed"),
        ([("double", "many")], "failed"),
        ([("triple", "1")], "failed"),
        ([("calculator", "1 / 0")], "failed"),
    ],
)
def test_plans_become_tasks_where_every_call_answers_is_needed_and_answers_the_same_again(judged, steps, found):
    assert judged(*steps) == found


def test_a_question_that_names_its_answer_is_left_out(judged):
    assert judged(("double", "21"), says="the double of 21, which is not 43") == "42"
    assert judged(("double", "21"), says="the double of 21, which is 42") == "names what is looked for"


def line(**changes):
    return {**operation("sum", "+"), **changes}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tool": "calculater"}, "Did you mean calculator?"),
        ({"arguments": {}}, "which calculator needs"),
        ({"arguments": {"expression": "1", "digits": "{a}{b}"}}, '"arguments" is no object of expression'),
        ({"says": "the sum of {a} and 2"}, '{b} must be in "arguments", in "says" and in "slots"'),
        ({"slots": {"a": {"integer": [2, 9]}, "b": {"integer": [9, 2]}}}, "the least and the largest"),
        ({"slots": {"a": {"integer": [2, 9]}, "b": {"number": 1}}}, 'the slot b is no object of "integer"'),
        ({"slots": {"a": {"integer": [2, 9]}, "b": {"of": "town"}}}, "takes results of kind 'town'"),
        ({"slots": {"a": {"integer": [2, 9]}, "b": {"values": []}}}, "the slot b has nothing to take"),
        ({"asks": "What?"}, '"asks" has {} once'),
        ({"result": "is"}, '"result" has {} once'),
        ({"kind": "number"}, "the unknown key 'kind'"),
    ],
)
def test_a_broken_file_of_steps_is_refused_and_nothing_is_written(tmp_path, changes, said):
    steps = write(tmp_path / "steps.jsonl", line(**changes))
    made = forward(CALCULATOR, tmp_path / "out", "--steps", steps)
    assert made.exit_code == 2
    assert f"{steps}" in made.stderr
    assert said in made.stderr
    assert not (tmp_path / "out").exists()


def test_what_gives_no_plans_is_refused(tmp_path):
    steps = write(tmp_path / "steps.jsonl", line(slots={name: {"integer": [2, 3]} for name in "ab"}))
    few = forward(CALCULATOR, tmp_path / "out", "--steps", steps, "--num", 4, "--heldout", 2, "--depth", 1)
    assert (few.exit_code, "there are not so many plans: 2 of 4 tasks to train on of 1 calls" in few.stderr) == (
        2,
        True,
    )
    none = forward(CALCULATOR, tmp_path / "out")
    assert (none.exit_code, "give one of them" in none.stderr) == (2, True)
    game = forward(RECIPES / "tiny_moe/gspo_kuhn_poker.yaml", tmp_path / "out", "--steps", steps)
    assert (game.exit_code, "this recipe has none" in game.stderr) == (2, True)


def proposal(first, second):
    calls = {f"{first} * {second}": f"the product of {first} and {second}", "{#1} + 100": "the sum of {#1} and 100"}
    steps = [
        {"tool": "calculator", "arguments": {"expression": one}, "says": says, "result": ""}
        for one, says in calls.items()
    ]
    return {"steps": steps, "asks": "Say {}?"}


@cache
def proposals():
    """What the model says, one after the other, of which every third and every fifth is no plan that is taken."""
    rng = Random(0)
    said = []
    for number in range(400):
        plan = proposal(rng.randint(100, 999), rng.randint(100, 999))
        if number % 3 == 0:
            plan["steps"][1]["tool"] = "abacus"
        if number % 5 == 0:
            plan["steps"][1]["arguments"]["expression"] = "7 + 100"
        said.append(f"Here it is: {json.dumps(plan)}" if number % 7 else "None.")
    return said


class _Model(BaseHTTPRequestHandler):
    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert "calculator" in request["messages"][0]["content"]
        body = json.dumps({"choices": [{"message": {"content": proposals()[request["seed"]]}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def model_url():
    server = HTTPServer(("127.0.0.1", 0), _Model)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()
    thread.join(10)


def test_a_models_plans_are_executed_and_those_that_fail_are_left_out(tmp_path, model_url, monkeypatch):
    monkeypatch.setattr("slimrl_tools.synthesis.forward.tasks.shares", lambda count, cells: [(2, count)])
    made = forward(CALCULATOR, tmp_path / "out", "--plan-url", model_url, "--plan-model", "policy", "--num", 10,
                   "--heldout", 3, "--depth", 2)  # fmt: skip
    assert made.exit_code == 0, made.output
    for prompt in [*tasks(tmp_path, "train"), *tasks(tmp_path, "heldout")]:
        said = re.fullmatch(r"Say the sum of the product of (\d+) and (\d+) and 100\?", prompt.messages[0]["content"])
        first, second = map(int, said.groups())
        assert prompt.label == str(first * second + 100)
    left_out = json.loads((tmp_path / "out/provenance.json").read_text())["left_out"]
    assert set(left_out) == {"failed", "not drawn", "superfluous step"}


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"steps": []}', '{"steps": [{"tool": "calculator"}]}', '{"steps": 3}', '{"steps": ["a"]}',
     json.dumps(proposal(1, 2)).replace("{#1}", "{#2}"), json.dumps(proposal(1, 2)).replace("Say {}", "Say"),
     json.dumps(proposal(1, 2)).replace('"result": ""', '"result": "it is"')],
)  # fmt: skip
def test_what_is_no_plan_is_not_taken(text):
    assert read_plan(text) is None
    assert read_plan(f"So: {json.dumps(proposal(1, 2))}.").question == "Say the sum of the product of 1 and 2 and 100?"
