"""Attempts to earn a reward without a correct answer: a table of them for each ready-made reward.

Those of code are in tests/integration/cheating_programs.py, those of judges and servers in test_http_rewards.py there.
"""

# ruff: noqa: E501
import asyncio
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from reward_cases import asked, said, sampled

from slimrl.agent.sandbox.pool import SandboxPool
from slimrl.base.threads import call_task_code
from slimrl.config.schema.agent import SandboxConfig
from slimrl.config.schema.reward import RewardPartConfig
from slimrl.rewards.comparison import equivalent
from slimrl.rewards.loading import Supplies, load_part
from slimrl.rewards.math import boxed_equivalent, boxed_exact

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "rewards.md"
ELSEWHERE = {
    "code:CodeTests": "test_code_rewards.py",
    "judge:Judge": "test_http_rewards.py",
    "judge:Pairwise": "test_http_rewards.py",
    "process:ProcessReward": "test_http_rewards.py",
    "remote:Remote": "test_http_rewards.py",
    "reasoning_gym:ReasoningGym": "test_reasoning_gym_reward.py",
    "search:Found": "test_found_reward.py",
    "math:boxed_equivalent": "test_reward_probes.py",
}
"""Rewards that need processes, servers or a corpus, and the file with their probes."""

EXACT = "slimrl.rewards.answers:ExactMatch"
OBJECT = {"schema": {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}, "required": ["a"]}}
TAGGED = {"answer_in": "<answer>"}


def tool(text):
    return {"role": "tool", "content": text}


def calls(*names, text="", **arguments):
    made = [{"function": {"name": name, "arguments": arguments}} for name in names]
    return {"role": "assistant", "content": text, "tool_calls": made}


def thought(text, thinking):
    trajectory = said(text)
    trajectory.messages[-1]["reasoning_content"] = thinking
    return trajectory


def tokens(count, *, text="", turns=None):
    trajectory = said(text)
    trajectory.segments = [sampled(list(range(count + 1)), [-0.5] * count, turns)]
    return trajectory


FOUND = [calls("search"), tool("The capital is Paris")]
LONG = " ".join(f"word{number}" for number in range(40))


def shown_answer():
    """An answer that the prompt's own conversation ends with, of a policy that says nothing."""
    return said("Paris", num_prompt_messages=2)


PROBES = [
    ("answers:ExactMatch", {}, "lists answers", lambda: said("Paris or London or Rome"), "Paris", 0),
    ("answers:ExactMatch", {}, "a tool says it", lambda: said("I have found it.", before=FOUND), "Paris", 0),
    ("answers:ExactMatch", {}, "a tool has the last word", lambda: said(None, before=[calls("f"), tool("Paris")]), "Paris", 0),
    ("answers:ExactMatch", {}, "the prompt says it", shown_answer, "Paris", 0),
    ("answers:ExactMatch", {}, "in its thinking", lambda: thought("London", "Paris"), "Paris", 0),
    ("answers:ExactMatch", {}, "in an earlier turn", lambda: said("London", before=[calls("f", text="Paris"), tool("")]), "Paris", 0),
    ("answers:ExactMatch", {}, "says nothing", lambda: said(""), "The A", 0),
    ("answers:ExactMatch", {}, "says an article", lambda: said("the"), "A", 0),
    ("answers:ExactMatch", TAGGED, "repeats tags", lambda: said("<answer>Paris</answer><answer>Rome</answer>"), "Paris", 0),
    ("answers:ExactMatch", TAGGED, "nests tags", lambda: said("<answer>Paris<answer>Rome</answer></answer>"), "Paris", 0),
    ("answers:ExactMatch", TAGGED, "hides it in a tag of another case", lambda: said("<Answer>Paris</Answer>"), "Paris", 0),
    ("answers:F1", {}, "copies the tool's text", lambda: said(f"{LONG} Paris {LONG}"), "Paris", 0.001),
    ("answers:F1", {}, "repeats the word", lambda: said("Paris " * 50), "Paris", 0.002),
    ("answers:F1", {}, "says yes and no", lambda: said("yes no"), "yes", 0),
    ("answers:F1", {}, "says nothing", lambda: said("..."), "-", 0),
    ("math:boxed_exact", {}, "the problem as its answer", lambda: said("\\boxed{2+3}"), 5, 0),
    ("math:boxed_exact", {}, "several boxes", lambda: said("\\boxed{5}\\boxed{6}\\boxed{7}"), 5, 0),
    ("math:boxed_exact", {}, "several numbers", lambda: said("\\boxed{5, 6, 7}"), 5, 0),
    ("math:boxed_exact", {}, "no number", lambda: said("\\boxed{nan}"), 5, 0),
    ("math:boxed_exact", {}, "a giant number", lambda: said("\\boxed{1" + "0" * 10**6 + "}"), 5, 0),
    ("math:boxed_exact", {}, "a tool's box", lambda: said("See above.", before=[calls("f"), tool("\\boxed{5}")]), 5, 0),
    ("math:boxed_exact", {}, "the prompt's box", lambda: said("\\boxed{5}", num_prompt_messages=2), 5, 0),
    ("math:boxed_exact", {}, "nothing in the box", lambda: said("\\boxed{ }"), "0", 0),
    ("format:Pattern", {"pattern": r"Answer: \d+"}, "another line", lambda: said("Answer: 1\nAnswer: 2"), None, 0),
    ("format:Pattern", {"pattern": r"\d*"}, "a tool has the last word", lambda: said(None, before=[calls("f"), tool("1")]), None, 0),
    ("format:Tags", {"names": ["a"]}, "repeats tags", lambda: said("<a>1</a><a>2</a>"), None, 0),
    ("format:Tags", {"names": ["a"]}, "an empty tag", lambda: said("<a>\n</a>"), None, 0),
    ("format:Tags", {"names": ["a"]}, "a tool has the form", lambda: said("", before=[calls("f"), tool("<a>1</a>")]), None, 0),
    ("json_schema:JsonSchema", OBJECT, "a key twice", lambda: said('{"a": 100, "a": 1}'), None, 0),
    ("json_schema:JsonSchema", OBJECT, "no number", lambda: said('{"a": NaN}'), None, 0),
    ("json_schema:JsonSchema", OBJECT, "a giant number", lambda: said('{"a": -' + "9" * 10**5 + "}"), None, 0),
    ("json_schema:JsonSchema", OBJECT, "a giant exponent", lambda: said('{"a": -1e999}'), None, 0),
    ("json_schema:JsonSchema", OBJECT, "deep nesting", lambda: said('{"a": 1, "b": ' + "[" * 10**5 + "}"), None, 0),
    ("json_schema:JsonSchema", OBJECT, "two objects", lambda: said('{"a": 1}{"a": 2}'), None, 0),
    ("json_schema:JsonSchema", OBJECT, "a boolean as a number", lambda: said('{"a": true}'), None, 0),
    ("length:CosineLength", {"of": EXACT, "max_tokens": 100}, "gives up at once", lambda: tokens(0), "x", -0.5),
    ("length:CosineLength", {"of": EXACT, "max_tokens": 100}, "thinks for ever", lambda: tokens(500, text="x"), "x", -0.5),
    ("length:Repetition", {"ngram": 2}, "repeats itself in other turns", lambda: repeated(turns=[0] * 9 + [1] * 9), None, -0.5),
    ("calibration:Calibration", {"of": EXACT}, "no confidence", lambda: said("Rome"), "Paris", -1),
    *(
        ("calibration:Calibration", {"of": EXACT}, f"confidence {stated}", lambda stated=stated: confident(stated), "Paris", -1)
        for stated in ("nan", "1e9", "150%", "2", "-1", "inf", "", "0.1 0.2", "\u0661")
    ),
    ("calibration:Calibration", {"of": EXACT}, "two confidences", lambda: said("<confidence>0</confidence>" * 2), "Paris", -1),
    ("calibration:Calibration", {"of": EXACT}, "wrong on purpose", lambda: confident("0"), "Paris", 0),
    ("tool_use:ToolSuccess", {}, "more calls make up for none", lambda: said("", num_tool_calls=100, num_tool_errors=4), None, 0),
    ("tool_use:ToolSuccess", {}, "no call", lambda: said(""), None, 0),
    ("tool_use:ResultUse", {}, "copies the result", lambda: said(LONG, before=[calls("f"), tool(LONG)]), None, 0),
    ("tool_use:ResultUse", {}, "an echo", lambda: said("xyzzy", before=[calls("echo", text="xyzzy"), tool("xyzzy")]), None, 0),
    ("tool_use:ResultUse", {}, "an echo of arguments", lambda: said("77", before=[calls("f", x="77"), tool("77")]), None, 0),
    ("tool_use:ResultUse", {}, "said before it is known", lambda: said("-", before=[calls("f", text="330 m"), tool("330 m")]), None, 0),
    ("tool_use:PlanConsistency", {}, "a plan afterwards", lambda: said("<plan>1. f</plan>", before=[calls("f"), tool("")]), None, 0),
    ("tool_use:PlanConsistency", {}, "two plans", lambda: said("", before=[calls("f", text="<plan>1. f</plan>" * 2), tool("")]), None, 0),
    ("tool_use:PlanConsistency", {}, "plans everything", lambda: said("", before=[calls("f", text=planned("f", "g", "h")), tool("")]), None, 0.5),
    ("unsupervised:Confidence", {}, "says nothing", lambda: said(""), None, 0),
    ("unsupervised:Confidence", {}, "repeats itself", lambda: looped(), None, math.exp(-0.5) + 1e-6),
]  # fmt: skip


def repeated(turns):
    trajectory = said("x")
    trajectory.segments = [sampled([0, *range(9), *range(9)], [-0.5] * 18, turns)]
    return trajectory


def looped():
    """Sixteen tokens of log-prob -0.5, then the last eight again and again, which it is sure of."""
    trajectory = said("x")
    trajectory.segments = [sampled([*range(16), *([*range(8, 16)] * 50)], [-0.5] * 16 + [0.0] * 400)]
    return trajectory


def confident(stated):
    return said(f"Rome <confidence>{stated}</confidence>")


def planned(*names):
    return "<plan>" + "\n".join(f"1. {name}" for name in names) + "</plan>"


def value_of(path, settings, trajectory, label):
    part = load_part("p", RewardPartConfig(function=f"slimrl.rewards.{path}", args=settings))
    value = asyncio.run(call_task_code(part.function, trajectory, asked(label)))
    return sum(value.values()) if isinstance(value, dict) else value


@pytest.mark.parametrize(
    ("path", "settings", "make", "label", "most"),
    [
        pytest.param(path, args, make, label, most, id=f"{path}: {name}")
        for path, args, name, make, label, most in PROBES
    ],
)
def test_a_probe_is_not_paid(path, settings, make, label, most):
    assert value_of(path, settings, make(), label) <= most


GROUP_PROBES = [
    ("empty boxes agree", ["\\boxed{}"] * 3 + ["\\boxed{5}"], [0, 0, 0, 0]),
    ("no boxes agree", ["5"] * 4, [0, 0, 0, 0]),
    ("votes twice", ["\\boxed{5}\\boxed{5}", "\\boxed{6}", "\\boxed{6}"], [0, 1, 1]),
    ("a text that is long for all", ["\\boxed{" + "x" * 400 + "}"] * 3, [0, 0, 0]),
    ("lists all answers", ["\\boxed{5, 6}", "\\boxed{5}", "\\boxed{6}", "\\boxed{6}"], [0, 0, 1, 1]),
]


@pytest.mark.parametrize(
    ("texts", "rewards"), [case[1:] for case in GROUP_PROBES], ids=[case[0] for case in GROUP_PROBES]
)
def test_a_probe_of_a_group_is_not_paid(texts, rewards):
    part = load_part("p", RewardPartConfig(function="slimrl.rewards.unsupervised:SelfConsistency"), "trajectories")
    assert asyncio.run(call_task_code(part.function, [said(text) for text in texts], asked())) == rewards


@pytest.mark.parametrize("sizes", [(1, 1), (1, 1, 1), (1,) * 10, (4, 1), (20, 1), (3, 2, 1)])
def test_naming_several_candidates_pays_no_more_than_the_likeliest(sizes):
    """Candidates of so many words each, one of which is right; all equally likely, then each in turn more likely."""
    names = [" ".join(f"w{number}x{place}" for place in range(size)) for number, size in enumerate(sizes)]
    paid = [value_of("answers:F1", {}, said(" ".join(names)), name) for name in names]
    standard = [value_of("answers:F1", {"power": 1.0}, said(" ".join(names)), name) for name in names]
    for likely in range(len(names)):
        for chance in (1 / len(names), 0.5, 0.9):
            chances = [chance if number == likely else (1 - chance) / (len(names) - 1) for number in range(len(names))]
            assert sum(map(float.__mul__, chances, paid)) <= max(chances) + 1e-9
    assert sum(standard) / len(names) > sum(paid) / len(names)


@pytest.mark.parametrize(
    "answer",
    [
        "4, 5",
        "4 \\text{ or } 5",
        "\\{4, 5\\}",
        "x \\in \\{4, 5\\}",
        "[0, 10]",
        "\\pm 5",
        "5 \\pm 1",
        "\\text{nan}",
        "\\infty",
        "x",
        "",
    ],
)
def test_symbolic_comparison_takes_no_hedge(answer):
    assert not equivalent(answer, "5")


CHEATS = [
    ("several boxes", "5", r"\boxed{5} or \boxed{6}"),
    ("a box in a box", "5", r"\boxed{\boxed{6}5}"),
    ("a box that does not end", "5", r"\boxed{5"),
    ("no answer as tables write it", "5", r"\boxed{None}"),
    ("no number", "5", r"\boxed{\text{nan}}"),
    ("a list of candidates", "5", r"\boxed{4, 5, 6}"),
    ("a set of candidates", "5", r"\boxed{\{0, 1, 2, 3, 4, 5, 6, 7, 8, 9\}}"),
    ("an interval around it", "5", r"\boxed{[0, 10]}"),
    ("an inequality", "5", r"\boxed{x \ge 5}"),
    ("both signs", "5", r"\boxed{\pm 5}"),
    ("a number with a hedge", "5", r"\boxed{5 \text{ or more}}"),
    ("a range in words", "5", r"\boxed{4 \text{ to } 6}"),
    ("all choices", "B", r"\boxed{A, B, C, D}"),
    ("all choices in brackets", "B", r"\boxed{(A)(B)(C)(D)}"),
    ("two choices", "B", r"\boxed{\text{A or B}}"),
    ("a look-alike of a letter", "A", "\\boxed{\N{CYRILLIC CAPITAL LETTER A}}"),
    ("digits of another script", "5", "\\boxed{\N{ARABIC-INDIC DIGIT FIVE}}"),
    ("a product for any order", "BCA", r"\boxed{A \cdot B \cdot C}"),
    ("an anagram", "cat", r"\boxed{act}"),
    ("an equation that ends with it", "5", r"\boxed{1=2=3=4=5}"),
    ("a wrong equation", "5", r"\boxed{3=5}"),
    ("an equation that holds for all", "x^2+y^2=25", r"\boxed{0=0}"),
    ("an equation of a name with itself", "y=2x+1", r"\boxed{y=y}"),
    ("a variable for any value", "5", r"\boxed{n}"),
    ("nothing divided by nothing", "5", r"\boxed{\frac{0}{0}}"),
    ("what cannot be read before a number", "5", r"\boxed{\foo{5} \bar 5}"),
    ("a tiny number for another", r"10^{-19}\pi", r"\boxed{10^{-31}\pi}"),
    ("zero for a tiny number", "9.1e-31", r"\boxed{0}"),
    ("a base for another", "52_8", r"\boxed{52_9}"),
    ("digits in a row", "345", r"\boxed{3 4 5}"),
    ("a number too large to compute", "5", r"\boxed{1e999999999}"),
    ("a text too long to read", "5", r"\boxed{" + "(" * 3000 + "5" + ")" * 3000 + "}"),
]


@pytest.mark.parametrize("function", [boxed_exact, boxed_equivalent])
@pytest.mark.parametrize(("label", "text"), [case[1:] for case in CHEATS], ids=[case[0] for case in CHEATS])
def test_a_box_that_hedges_or_cheats_is_not_paid(monkeypatch, function, label, text):
    monkeypatch.setattr("slimrl.rewards.math.shared_comparers", lambda: SimpleNamespace(equivalent=equivalent))
    assert function(said(text), asked(label)) == 0.0


def test_an_honest_answer_is_paid():
    right = value_of(
        "calibration:Calibration",
        {"of": EXACT, "of_args": TAGGED},
        said("<answer>x</answer><confidence>0.9</confidence>"),
        "x",
    )
    assert right == pytest.approx(0.99)
    assert value_of("unsupervised:Confidence", {}, looped(), None) == pytest.approx(math.exp(-0.5))


def test_the_example_of_the_page_is_what_a_recipe_may_say():
    (example,) = [block for block in re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.S) if "CodeTests" in block]
    for section, parts in yaml.safe_load(example)["reward"].items():
        for name, settings in (parts or {}).items():
            subject = "trajectories" if section == "group" else "trajectory"
            load_part(
                name, RewardPartConfig(**settings), subject, Supplies({SandboxPool: SandboxPool(SandboxConfig())})
            )


@pytest.mark.parametrize(
    ("function", "args", "problem"),
    [
        ("judge:Judge", {"url": "http://a", "model": "m"}, "missing a required.* 'rubric'"),
        (
            "judge:Judge",
            {"url": "http://a", "model": "m", "rubric": "r", "scale": 5},
            "unexpected keyword argument 'scale'",
        ),
        ("answers:F1", {"answer_in": "box"}, "answer_in: 'box' is neither"),
        ("calibration:Calibration", {"of": "slimrl.rewards.math:boxed"}, "has no boxed|no function"),
        ("length:CosineLength", {"of": EXACT}, "missing a required.* 'max_tokens'"),
        ("remote:Remote", {"url": "http://a", "api_key_env": "SLIMRL_NO_KEY"}, "no variable SLIMRL_NO_KEY"),
    ],
)
def test_wrong_arguments_are_a_problem_of_the_recipe(function, args, problem):
    with pytest.raises(ValueError, match=problem):
        load_part("p", RewardPartConfig(function=f"slimrl.rewards.{function}", args=args))


def test_each_ready_made_reward_of_the_page_has_a_probe():
    listed = set(re.findall(r"`slimrl\.rewards\.(\w+:\w+)`", PAGE.read_text()))
    probed = {path for path, *_ in PROBES} | {"unsupervised:SelfConsistency"} | ELSEWHERE.keys()
    assert listed == probed
    for path, file in ELSEWHERE.items():
        (found,) = ROOT.glob(f"tests/*/{file}")
        assert path.partition(":")[2] in found.read_text()
