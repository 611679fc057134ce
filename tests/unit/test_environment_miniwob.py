"""What the policy may do on a page, and how players read it; no browser."""

import json
import random

import pytest

from slimrl.environments.miniwob.actions import HELP, PARAMETERS, Action, parse_action
from slimrl.environments.miniwob.demonstrations import conversations
from slimrl.environments.miniwob.page_reader import Line, Page


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("click(12)", Action(name="click", element=12)),
        ("I take the second.\n  click( 12 ) \n", Action(name="click", element=12)),
        ('fill(3, "a, b) \\"c\\"")', Action(name="fill", element=3, text='a, b) "c"')),
        ('select(3, "")', Action(name="select", element=3)),
        ('press(3, "Enter")', Action(name="press", element=3, text="Enter")),
        ('press(3, "x")', Action(name="press", element=3, text="x")),
        ("scroll(3, -40)", Action(name="scroll", element=3, pixels=-40)),
        ("noop()", Action(name="noop")),
    ],
)
def test_an_action_is_the_last_line(text, action):
    assert parse_action(text) == action


@pytest.mark.parametrize(
    "text",
    [
        "", "click", "click(12) now", "`click(12)`", "click(12)\nThat was it.", "click()", "click(12, 13)",
        'click("12")',
        "click(1.5)", "click(+1)", "click(1_0)", "click(12,)", "click(,12)", "click(12 13)", "noop(1)", "noop(,)",
        "fill(12, 'text')", "fill(12, text)", 'fill(12, f"a")', 'fill(12, "a" "b")', 'fill(12, "a" + "b")',
        'fill(12, "\\ud800")', 'fill(12, "\\x41")', 'fill("a", 12)', 'fill(12, ["a"])', "scroll(3, 1000000)",
        "click(" + "[" * 100_000, "click(" + "9" * 10_000 + ")",
        # What would leave or close the page, or run a script in it.
        "close()", "go_back()", "goto(\"javascript:core.endEpisode(1)\")", "click(core.endEpisode(1))", "eval(\"1\")",
        "__import__(\"os\")", "page.close()", "click(page.close())", 'press(12, "Control+w")',
        'press(12, "Alt+ArrowLeft")',
        'press(12, "F5")', 'press(12, "Control+v")', 'press(12, "")', 'press(12, "\\u0007")',
    ],
)  # fmt: skip
def test_no_other_text_is_an_action(text):
    with pytest.raises(ValueError, match=r"."):
        parse_action(text)


def test_texts_are_read_as_json_reads_them():
    rng = random.Random(0)
    for _ in range(300):
        text = "".join(rng.choices('ab"\\,() \n\té€\U0001f600', k=rng.randrange(12)))
        written = json.dumps(text, ensure_ascii=rng.random() < 0.5)
        assert parse_action(f"fill(7, {written})") == Action(name="fill", element=7, text=text)


def test_each_action_has_an_example_that_is_one():
    examples = [line.partition(": ")[0] for line in HELP.splitlines()[1:]]
    assert [parse_action(example).name for example in examples] == list(PARAMETERS)


def test_players_read_both_views():
    tree = "Goal: Enter \"x\" in 'y'.\n[12] combobox 'Size' value='S', options=['S', \"L's\"]\n\tStaticText 'a\\'b'"
    marks = 'Act.\n\nGoal: Enter "x" in \'y\'.\n[12] combobox "Size" value="S" options=["S", "L\'s"]'
    lists = Line(number=12, role="combobox", name="Size", value="S", options=("S", "L's"))
    assert Page(tree).goal == Page(marks).goal == "Enter \"x\" in 'y'."
    assert Page(marks).lines == [lists]
    assert Page(tree).lines == [lists, Line(number=None, role="StaticText", name="a'b")]


def test_demonstrations_are_right_about_half_of_the_time():
    right, shown = 0, list(conversations(2000, "Act.", random.Random(1)))
    for conversation in shown:
        asked, answer = (message["content"] for message in conversation["messages"])
        page = Page(asked)
        clicked = parse_action(answer).element
        assert clicked in page.numbers
        name = next(line.name for line in page.lines if line.number == clicked)
        right += f'"{name}"' in page.goal or (name == "ONE" and "ONE" in page.goal)
    assert 0.4 < right / len(shown) < 0.6
