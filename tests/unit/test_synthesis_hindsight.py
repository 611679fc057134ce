"""`slimrl-tools synthesize hindsight`: trajectories told again as solutions of what they found."""

import json
import random

import pytest
from slimrl_tools.cli import app
from slimrl_tools.synthesis.graph import read_graph
from slimrl_tools.synthesis.passages import Passages
from slimrl_tools.synthesis.phrases import read_phrases
from slimrl_tools.synthesis.questions import Questions
from slimrl_tools.synthesis.rendering import Renderer
from typer.testing import CliRunner

from slimrl.data.prompts import read_prompts

FACTS = [
    ("Elm Works", "founder", "Ann Lee"), ("Oak Works", "founder", "Bo Day"), ("Fir Works", "founder", "Cy Fox"),
    ("Ann Lee", "teacher", "Di Roe"), ("Bo Day", "teacher", "Ed Poe"), ("Cy Fox", "teacher", "Flo Low"),
    ("Di Roe", "home", "Rome"), ("Ed Poe", "home", "Oslo"), ("Flo Low", "home", "Bonn"), ("Ann Lee", "home", "Bonn"),
]  # fmt: skip


@pytest.fixture
def graph_file(tmp_path):
    lines = [{"subject": s, "relation": r, "object": o} for s, r, o in FACTS]
    file = tmp_path / "graph.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def seed_holding(graph_file, name: str, held: bool) -> int:
    """A seed with which an entity is held out, or none that these tests ask for."""
    graph = read_graph(graph_file)
    renderer = Renderer(graph, read_phrases(None, graph.relations))
    wanted = {"Elm Works", "Ann Lee", "Di Roe", "Rome", "Bo Day", "Ed Poe"}
    for seed in range(100):
        heldout = Questions(graph, renderer, random.Random(seed)).heldout
        if (name in heldout) if held else not heldout & wanted:
            return seed
    raise AssertionError("no such seed")


def trajectory(graph_file, *searches) -> str:
    """Searches by their words, each with the subjects of the passages that it is shown."""
    graph = read_graph(graph_file)
    passages = Passages(graph, read_phrases(None, graph.relations))
    ids = {subject: name for name, subject in passages.subjects.items()}
    texts = {one["id"]: one["text"] for one in passages.lines()}
    messages = [{"role": "user", "content": "What is it?"}]
    for words, subjects in searches:
        call = {"function": {"name": "search", "arguments": json.dumps({"query": words})}}
        result = "\n".join(f"[{ids[subject]}] {texts[ids[subject]]}" for subject in subjects)
        messages += [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": result}]
    return json.dumps({"messages": [*messages, {"role": "assistant", "content": "\\boxed{no idea}"}], "reward": 0.0})


TEACHER = [("founder of Elm Works", ["Elm Works", "Oak Works"]), ("Ann Lee teacher", ["Ann Lee"])]
HOME = [*TEACHER, ("where is the home of Di Roe?", ["Di Roe"])]
OTHER = ("teacher of Bo Day", ["Bo Day"])
BACK = [("who has the home Rome", ["Di Roe"]), ("whose teacher is Di Roe", ["Ann Lee"])]


@pytest.mark.parametrize(
    ("searches", "question", "label", "used"),
    [
        (TEACHER, "What is the teacher of the founder of Elm Works?", "Di Roe", TEACHER),
        (HOME, "What is the home of the teacher of the founder of Elm Works?", "Rome", HOME),
        (BACK, "What has as its teacher the thing that has as its home Rome?", "Ann Lee", BACK),
        # The second search does not go on from what the first one found.
        ([TEACHER[0], OTHER], "What is the teacher of Bo Day?", "Ed Poe", [OTHER]),
        # Its result does not show the passage, and then its words name no relation.
        ([TEACHER[0], ("Ann Lee teacher", ["Elm Works"])], "What is the founder of Elm Works?", "Ann Lee", TEACHER[:1]),
        ([TEACHER[0], ("Ann Lee", ["Ann Lee"])], "What is the founder of Elm Works?", "Ann Lee", TEACHER[:1]),
    ],
)
def test_the_last_thing_that_was_found_is_asked_for(tmp_path, graph_file, searches, question, label, used):
    file = tmp_path / "rollout.jsonl"
    nothing = trajectory(graph_file, ("Elm Works", ["Elm Works"]))
    file.write_text(f"{nothing}\n{trajectory(graph_file, *searches)}\n")
    seed = seed_holding(graph_file, "", held=False)
    made = CliRunner().invoke(
        app, ["synthesize", "hindsight", str(file), str(graph_file), str(tmp_path / "out"), "--seed", str(seed)]
    )
    assert made.stdout == f"{tmp_path / 'out'}: 1 questions of 2 trajectories\n", made.output
    (prompt,) = read_prompts(tmp_path / "out/train.jsonl")
    assert (prompt.messages[0]["content"], prompt.label) == (question, label)
    (told,) = [json.loads(line)["messages"] for line in (tmp_path / "out/sft.jsonl").read_text().splitlines()]
    calls = [one["tool_calls"][0]["function"]["arguments"]["query"] for one in told if "tool_calls" in one]
    assert calls == [words for words, _ in used]
    assert told[-1]["content"] == f"The answer is \\boxed{{{label}}}."


def test_what_is_held_out_is_not_asked_for(tmp_path, graph_file):
    file = tmp_path / "rollout.jsonl"
    file.write_text(trajectory(graph_file, *HOME))
    seed = seed_holding(graph_file, "Rome", held=True)
    made = CliRunner().invoke(
        app, ["synthesize", "hindsight", str(file), str(graph_file), str(tmp_path / "out"), "--seed", str(seed)]
    )
    assert made.exit_code == 0, made.output
    assert "Rome" not in (tmp_path / "out/train.jsonl").read_text()
    assert json.loads((tmp_path / "out/provenance.json").read_text())["left_out"]["held_out"] > 0


def test_calls_that_a_policy_has_broken_are_passed_over_and_lines_without_messages_refused(tmp_path, graph_file):
    call = {"function": {"name": "search", "arguments": '{"query": '}}
    broken = {"messages": [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "error"}]}
    file = tmp_path / "rollout.jsonl"
    file.write_text(json.dumps(broken))
    command = ["synthesize", "hindsight", str(file), str(graph_file)]
    made = CliRunner().invoke(app, [*command, str(tmp_path / "out")])
    assert made.stdout == f"{tmp_path / 'out'}: 0 questions of 1 trajectories\n"
    file.write_text('{"messages": "none"}')
    refused = CliRunner().invoke(app, [*command, str(tmp_path / "new")])
    assert (refused.exit_code, refused.stderr) == (2, f'{file}:1: "messages" is no list of messages\n')
