"""The task with tools of docs/new_task.md, made of the page's own blocks, and what other pages add to it."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from slimrl.agent.call_schemas import refuse_wrong_calls
from slimrl.agent.tools import make_tool
from slimrl.config.check import check_loaded
from slimrl.config.load import load_recipe
from slimrl.data.prompt import Prompt
from slimrl.data.prompts import read_conversations, read_prompts
from slimrl.data.trajectory import Status, Trajectory

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the page's files; the text before a block names its file first."""
    section = (DOCS / "new_task.md").read_text().partition("## A task with tools")[2].partition("\n## ")[0]
    text, *rest = re.split(r"```.*\n", section)
    names = []
    for block, after in zip(rest[::2], rest[1::2], strict=True):
        if found := re.search(r"`(clock\w*\.\w+)`", text):
            names.append(found[1])
            (tmp_path / found[1]).write_text(block)
        text = after
    assert names == ["clock.jsonl", "clock_heldout.jsonl", "clock.py", "clock.yaml"]
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def clock(task: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("clock", task / "clock.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_its_recipe_is_accepted_and_evaluates_on_other_prompts_than_it_trains_on(
    task: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(str(task))
    loaded = load_recipe("clock.yaml", ["model.path=absent"], "train")
    assert [problem.key for problem in check_loaded(loaded) if not problem.warning] == ["model.path"]
    data = loaded.recipe.data
    trained, held_out = read_prompts(Path(data.train)), read_prompts(Path(data.eval["heldout"]))
    assert not {str(prompt.messages) for prompt in trained} & {str(prompt.messages) for prompt in held_out}
    for prompt in trained + held_out:
        first, second = re.findall(r"(\d\d):(\d\d)", prompt.messages[-1]["content"])
        assert prompt.label == 60 * (int(second[0]) - int(first[0])) + int(second[1]) - int(first[1])


def test_its_tool_is_one(clock: ModuleType):
    assert make_tool(clock.minutes).schema["function"]["parameters"]["required"] == ["time"]
    assert clock.minutes("09:40") == 580


@pytest.mark.parametrize(
    ("role", "content", "turns", "rewards"),
    [
        ("assistant", "There are 205 minutes.", 3, {"answer": 1.0, "brevity": 0.1}),
        ("assistant", "785 - 580 = 205", 4, {"answer": 1.0, "brevity": 0.0}),
        ("tool", "205", 3, {"answer": 0.0, "brevity": 0.0}),
        ("user", "205", 1, {"answer": 0.0, "brevity": 0.0}),
        ("assistant", "2050", 1, {"answer": 0.0, "brevity": 0.0}),
        ("assistant", "205 or 206", 1, {"answer": 0.0, "brevity": 0.0}),
        ("assistant", "", 1, {"answer": 0.0, "brevity": 0.0}),
        ("assistant", None, 1, {"answer": 0.0, "brevity": 0.0}),
    ],
)
def test_its_reward_pays_for_what_the_model_answers_at_the_end_alone(clock: ModuleType, role, content, turns, rewards):
    trajectory = Trajectory(
        group_id="g",
        trajectory_id="t",
        segments=[],
        status=Status.completed,
        messages=[{"role": "assistant", "content": "205"}, {"role": role, "content": content}],
        metadata={"num_turns": turns},
    )
    assert clock.reward(trajectory, Prompt(prompt_id="g", messages=[], label=205)) == rewards


def test_its_rewards_of_turns_are_one_for_each(clock: ModuleType):
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "rewards.md").read_text(), re.DOTALL)
    (block,) = [code for code in blocks if "Score(" in code]
    exec(block, vars(clock))
    asked = [{"role": "user", "content": "q"}]
    trajectory = Trajectory(
        group_id="g",
        trajectory_id="t",
        segments=[],
        status=Status.truncated,
        messages=[
            {"role": "system", "content": "s"},
            *asked,
            {"role": "assistant", "content": "an answer that an agent shows the policy"},
            *asked,
            {"role": "assistant", "content": None, "tool_calls": [{}]},
            {"role": "tool", "content": "580"},
            {"role": "assistant", "content": "205"},
        ],
        metadata={"num_turns": 3, "num_prompt_messages": 4},
    )
    scored = clock.reward_by_turn(trajectory, Prompt(prompt_id="g", messages=asked, label=205))
    assert (scored.reward, scored.turn_rewards) == ({"answer": 1.0, "brevity": 0.1}, [0.1, 0.0, 0.0])


def test_the_schemas_of_its_tools_are_what_conversations_may_have(
    task: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The snippet of docs/data_formats.md."""
    monkeypatch.syspath_prepend(str(task))
    monkeypatch.delitem(sys.modules, "clock", raising=False)
    snippets = re.findall(r"```python\n(.*?)```", (DOCS / "data_formats.md").read_text(), re.DOTALL)
    (snippet,) = [text for text in snippets if "ToolBox" in text]
    exec(snippet, {})
    tools = json.loads(capsys.readouterr().out)
    assert [(tool["function"]["name"], [*tool["function"]["parameters"]["properties"]]) for tool in tools] == [
        ("minutes", ["time"])
    ]
    call = {"function": {"name": "minutes", "arguments": {"time": "09:40"}}}
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]}
    (task / "sft.jsonl").write_text(json.dumps(row | {"tools": tools}) + "\n")
    (conversation,) = read_conversations(task / "sft.jsonl")
    refuse_wrong_calls(conversation.messages, conversation.tools)
    call["function"]["arguments"] = {"hour": 9}
    with pytest.raises(ValueError, match="of minutes: malformed tool call"):
        refuse_wrong_calls(row["messages"], conversation.tools)
