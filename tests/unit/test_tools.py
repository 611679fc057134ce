"""Tools: schemas, deadlines and errors; the calculator against Python's own integers and fractions."""

import asyncio
import dataclasses
import datetime
import decimal
import enum
import functools
import json
import math
import operator
import random
import re
import sys
import time
import typing
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pydantic
import pytest
from scripted_episode import END, PROMPT, call_text, played, runner_of

from slimrl.agent import tools
from slimrl.agent.calculator import MAX_BITS, calculator
from slimrl.agent.parsers import ParsedTurn, make_parser
from slimrl.agent.tool_call import ToolCall
from slimrl.agent.tool_environment import ToolEnvironment
from slimrl.agent.tools import EpisodeInfo, ToolAnswer, ToolBox, ToolCrash, ToolError, make_tool, tool
from slimrl.config.import_path import resolve
from slimrl.config.schema.agent import AgentConfig
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Status, Trajectory, to_json
from slimrl.rollout.environment_metrics import environment_metrics


def scale(value: int, factor: float = 2.0) -> float:
    """Multiply.

    Args:
        value: What is multiplied.
        factor: What it is multiplied with.
    """
    return value * factor


async def slow_echo(text: str, delay_s: float) -> str:
    """Echo.

    Args:
        text: What comes back.
        delay_s: How much later.
    """
    await asyncio.sleep(delay_s)
    return text


def sleep(seconds: float) -> str:
    """Sleep.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return "slept"


def broken() -> str:
    """Break."""
    raise KeyError("inside")


def find(place: str) -> str:
    """Find.

    Args:
        place: Where.
    """
    raise ValueError(f"there is no {place}")


def no_docstring(x: int) -> int:
    return x


TOOLS = ToolBox([make_tool(function) for function in (scale, slow_echo, sleep, broken, calculator, find)])


def test_annotations_and_docstring_make_the_schema():
    function = make_tool(scale).schema["function"]
    assert (function["name"], function["description"]) == ("scale", "Multiply.")
    assert function["parameters"]["properties"]["value"] == {"type": "integer", "description": "What is multiplied."}
    assert function["parameters"]["required"] == ["value"]
    assert set(function) == {"name", "description", "parameters"}


class Speaker:
    """Speak.

    Args:
        text: What is said.
    """

    def __init__(self, text: str) -> None:
        self.text = text


def takes_a_speaker(speaker: Speaker) -> Speaker:
    """Speak.

    Args:
        speaker: Who does.
    """
    return speaker


def takes_what_is_nowhere(value: "Nowhere") -> str:  # noqa: F821
    """Speak.

    Args:
        value: Of no type.
    """
    return str(value)


def returns_what_is_nowhere(value: int) -> "json.Nowhere":
    """Speak.

    Args:
        value: Of no type.
    """
    return str(value)


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (no_docstring, "tool .*no_docstring"),
        (Speaker, "Speaker.*: a tool is a function"),
        (Speaker("hi"), "Speaker.*: a tool is a function"),
        (functools.partial(scale, 2), "scale.*: a tool is a function"),
        (functools.cache(scale), "tool .*:scale: .*functions, not instances"),
        (takes_a_speaker, "tool .*:takes_a_speaker: its parameter speaker is annotated with Speaker, which no schema"),
        (
            takes_what_is_nowhere,
            "tool .*:takes_what_is_nowhere: the annotation Nowhere of its parameter value cannot be resolved: "
            "name 'Nowhere' is not defined. Import or define it",
        ),
        (
            returns_what_is_nowhere,
            r"tool .*: the annotation json.Nowhere of what it returns cannot be resolved: module 'json' has no",
        ),
    ],
)
def test_what_makes_no_tool_is_refused(function, problem):
    with pytest.raises(ValueError, match=problem):
        make_tool(function)


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(ValueError, match="one name"):
        ToolBox([make_tool(scale), make_tool(scale)])


async def test_synchronous_and_asynchronous_tools_answer_with_text():
    assert await TOOLS.call("scale", {"value": 4}, 5) == ToolAnswer(text="8.0")
    assert await TOOLS.call("slow_echo", {"text": "hi", "delay_s": 0}, 5) == ToolAnswer(text="hi")


class Point(pydantic.BaseModel):
    x: int
    tags: set[str]


@dataclasses.dataclass
class Found:
    place: Point
    at: datetime.date
    ratio: decimal.Decimal
    colour: "Colour"


class Colour(enum.StrEnum):
    red = "rot"


class Size(enum.IntEnum):
    big = 3


FOUND = Found(Point(x=1, tags={"b", "a"}), datetime.date(2026, 5, 4), decimal.Decimal("0.10"), Colour.red)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("as it is: {'a': 1}\n", "as it is: {'a': 1}\n"),
        (Colour.red, "rot"),
        (None, None),
        (True, True),
        (7, 7),
        (Size.big, 3),
        (0.1, 0.1),
        ({"a": True, "n": None, "ü": [1, (2.5, "x")]}, {"a": True, "n": None, "ü": [1, [2.5, "x"]]}),
        ([], []),
        ({3: "a", "b": {"c"}}, {"3": "a", "b": ["c"]}),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (Path("a") / "b", "a/b"),
        (
            FOUND,
            {"place": {"x": 1, "tags": ["a", "b"]}, "at": "2026-05-04", "ratio": "0.10", "colour": "rot"},
        ),
    ],
)
async def test_what_is_no_text_is_told_as_json(value: Any, told: Any):
    def given() -> Any:
        """Give."""
        return value

    answer = (await ToolBox([make_tool(given)]).call("given", {}, 5)).text
    if isinstance(value, str):
        assert answer == told
    else:
        assert json.loads(answer) == told
    assert "\\u" not in answer


LOOP: list[Any] = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (b"12", "returned bytes: bytes are no text; decode them"),
        ({"a": [bytearray(b"12")]}, "returned dict: bytes are no text; decode them"),
        (object(), "returned object: object is neither text nor JSON"),
        ({(1, 2): 3}, "returned dict: keys must be str"),
        (LOOP, "returned list: Circular reference"),
        (functools.reduce(lambda inner, _: [inner], range(100_000), []), "returned list that is nested too deep"),
        ([math.nan, b"12"], "returned list: "),
        ((n for n in range(3)), "returned generator: generator is neither"),
    ],
)
async def test_what_json_cannot_say_is_refused_by_the_tool_s_name(value: Any, why: str):
    def given() -> Any:
        """Give."""
        return value

    with pytest.raises(ToolCrash, match=rf"^tool given: {re.escape(why)}.*A tool returns a text, or what JSON can say"):
        await ToolBox([make_tool(given)]).call("given", {}, 5)


@pytest.mark.parametrize("value", [math.nan, {"a": [-math.inf]}, np.array([math.inf]), np.float32("nan")])
async def test_the_model_is_told_of_a_result_that_is_no_number_and_goes_on(value: Any):
    def ratio(part: int) -> Any:
        """Divide.

        Args:
            part: What is divided.
        """
        return value if part == 0 else 1 / part

    box = ToolBox([make_tool(ratio)])
    with pytest.raises(ToolError, match=r"^ratio returned NaN or infinity, which is no number$"):
        await box.call("ratio", {"part": 0}, 5)
    trajectory = await played(runner_of(call_text("ratio", part=0), call_text("ratio", part=2), END, tools=box))
    assert trajectory.status is Status.completed
    told = [message["content"] for message in trajectory.messages if message["role"] == "tool"]
    assert "ratio returned NaN or infinity" in told[0]
    assert told[1] == "0.5"


@pytest.mark.parametrize("answers", [call_text("broken"), call_text("broken") + call_text("scale", value=2)])
async def test_the_log_has_the_place_where_a_tool_crashed(answers: str, caplog: pytest.LogCaptureFixture):
    trajectory = await played(runner_of(answers, tools=TOOLS))
    assert trajectory.status is Status.failed
    assert trajectory.metadata["error"] == "tool broken: KeyError('inside')"
    assert "t: tool broken: KeyError('inside')" in caplog.text
    assert f'File "{__file__}", line {broken.__code__.co_firstlineno + 2}, in broken' in caplog.text


def test_a_tool_that_says_it_returns_bytes_is_refused_before_it_is_called():
    def raw() -> bytes:
        """Read."""
        return b""

    with pytest.raises(ValueError, match=r"tool .*raw: returns bytes, which are no text"):
        make_tool(raw)


async def test_a_call_of_the_model_does_not_change_what_the_recipe_gives_a_tool():
    """Nor which sandbox or episode a tool gets."""

    def spoken(info: EpisodeInfo, word: str, times: int = 1) -> str:
        """Say.

        Args:
            word: What.
            times: How often.
        """
        return word * times + info.prompt.prompt_id

    box = ToolBox([make_tool(scale, {"factor": 3.0}), make_tool(spoken, {"times": 2})])
    shown = [set(schema["function"]["parameters"]["properties"]) for schema in box.schemas]
    assert shown == [{"value"}, {"word"}]
    assert (await box.call("scale", {"value": 2, "factor": 10.0}, 5)).text == "6.0"
    info = EpisodeInfo(prompt=PROMPT, seed=0, scratch={})
    answer = await box.call("spoken", {"word": "a", "times": 9, "info": {"prompt": "mine"}}, 5, info)
    assert answer.text == f"aa{PROMPT.prompt_id}"


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        ("nothing", {}, "unknown tool nothing; known: scale, slow_echo"),
        ("scale", {}, "value: Missing required argument"),
        ("scale", {"value": "many"}, "value: Input should be a valid integer"),
        ("scale", {"value": 1, "more": 2}, "more: Unexpected keyword argument"),
        ("scale", {"value": [[]]}, "value: "),
        ("calculator", {"expression": "1/0"}, "division by zero"),
        ("find", {"place": "Atlantis"}, "there is no Atlantis"),
        ("calculator", {"expression": 5}, "expression: Input should be a valid string"),
    ],
)
async def test_what_the_model_did_wrong_is_said_in_one_line(name, arguments, problem):
    with pytest.raises(ToolError) as caught:
        await TOOLS.call(name, arguments, 5)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "arguments"), [("sleep", {"seconds": 3}), ("slow_echo", {"text": "", "delay_s": 3})])
async def test_a_tool_that_hangs_is_left_at_its_deadline(name, arguments):
    start = time.monotonic()
    with pytest.raises(ToolError, match=r"no answer within 0.05 s"):
        await TOOLS.call(name, arguments, 0.05)
    assert time.monotonic() - start < 2


async def test_hanging_tools_do_not_hold_up_others():
    hanging = [asyncio.create_task(TOOLS.call("sleep", {"seconds": 3}, 2)) for _ in range(40)]
    await asyncio.sleep(0)
    start = time.monotonic()
    assert await TOOLS.call("scale", {"value": 1}, 5) == ToolAnswer(text="2.0")
    assert time.monotonic() - start < 1.5
    for task in hanging:
        task.cancel()
    await asyncio.gather(*hanging, return_exceptions=True)


async def test_an_error_that_the_tool_did_not_foresee_is_not_the_models():
    with pytest.raises(ToolCrash, match="tool broken: KeyError"):
        await TOOLS.call("broken", {}, 5)


def leave() -> str:
    """Leave."""
    sys.exit(3)


def run_out() -> str:
    """Run out."""
    return next(iter(()))


async def leave_later() -> str:
    """Leave."""
    await asyncio.sleep(0)
    sys.exit(3)


async def cancel_itself() -> str:
    """Cancel."""
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (leave, "SystemExit"),
        (run_out, "StopIteration"),
        (leave_later, "SystemExit"),
        (cancel_itself, "cancelled itself"),
    ],
)
async def test_a_tool_that_ends_by_no_ordinary_exception_is_named_at_once(function, problem):
    start = time.monotonic()
    with pytest.raises(ToolCrash, match=f"tool {function.__name__}: .*{problem}"):
        await ToolBox([make_tool(function)]).call(function.__name__, {}, 5)
    assert time.monotonic() - start < 2


async def test_an_asynchronous_tool_that_is_late_is_cancelled():
    ended_by = asyncio.get_running_loop().create_future()

    async def wait_long() -> str:
        """Wait."""
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError as error:
            ended_by.set_result(type(error))
            raise
        return ""

    with pytest.raises(ToolError, match="no answer within"):
        await ToolBox([make_tool(wait_long)]).call("wait_long", {}, 0.05)
    assert await asyncio.wait_for(ended_by, 5) is asyncio.CancelledError


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("os.path.join", "write module:function"),
        ("no_such_module:f", "no module no_such_module"),
        ("slimrl.no_such:f", "no module slimrl.no_such"),
        ("os.path:no_such", "has no no_such"),
        ("os:sep", "not a function but str"),
        ("slimrl.agent.parsers:NoCalls", "NoCalls is a class"),
    ],
)
def test_an_import_path_that_names_no_function_is_refused(path, problem):
    with pytest.raises(ValueError, match=problem):
        resolve(path)


def test_an_import_path_names_a_function():
    assert resolve("operator:add") is operator.add
    assert ToolBox.from_import_paths(["slimrl.agent.calculator:calculator"]).schemas[0]["function"]["name"] == (
        "calculator"
    )


def test_the_calculator_agrees_with_python_integers_on_random_expressions():
    rng = random.Random(0)
    for _ in range(300):
        terms = [str(rng.randint(0, 10**9)) for _ in range(4)]
        a, b, c = (rng.choice(["+", "-", "*", "//", "%"]) for _ in range(3))
        expression = f"({terms[0]}{a}{terms[1]}){b}-{terms[2]}{c}{terms[3]}"
        try:
            expected = str(eval(expression))
        except ZeroDivisionError:
            continue
        assert calculator(expression) == expected


@pytest.mark.parametrize(
    ("expression", "answer"),
    [
        ("2**100", str(2**100)),
        ("12345678901234567890*98765432109876543210", str(12345678901234567890 * 98765432109876543210)),
        ("10**30/10**29", "10"),
        ("0.1+0.2", "0.3"),
        ("1/3", "0.333333333333333"),
        ("2**-2", "0.25"),
        (" ( 1 + 2 ) * +3 ", "9"),
        ("1e3", "1000"),
        ("-7//2", "-4"),
        ("7.5%2", "1.5"),
        ("1**999999999", "1"),
        ("-" * 399 + "1", "-1"),
    ],
)
def test_the_calculator_is_exact(expression, answer):
    assert calculator(expression) == answer


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "1+",
        "x",
        "f(1)",
        "__import__('os')",
        "'a'*3",
        "True+1",
        "1 if 2 else 3",
        "[1]",
        "1j",
        "1;2",
        "2^3",
        "(" * 300,
        "9**9**9",
        "9**-6000000",
        "10**2000",
        "2**0.5",
        "0**-1",
        "1%0",
        "1e999999999",
        "1+" * 300 + "1",
    ],
)
def test_the_calculator_refuses_what_is_no_bounded_arithmetic(expression):
    start = time.thread_time()
    with pytest.raises(ToolError):
        calculator(expression)
    assert time.thread_time() - start < 1


def test_the_bound_of_the_calculator_is_where_it_says():
    assert Fraction(calculator(f"2**{MAX_BITS // 2}")) == 2 ** (MAX_BITS // 2)
    with pytest.raises(ToolError, match="too large"):
        calculator(f"2**{MAX_BITS}")
    longest = f"2**{MAX_BITS // 2}*2**{MAX_BITS // 2 - 1}"
    assert int(calculator(longest)).bit_length() == MAX_BITS
    assert calculator(f"1/({longest})") != "0"
    for larger in (f"{longest}*2", f"1/({longest})/2"):
        with pytest.raises(ToolError, match="too large"):
            calculator(larger)
    assert calculator(f"(1/3)**{MAX_BITS // 2}*3**{MAX_BITS // 2}") == "1"
    with pytest.raises(ToolError, match="too large"):
        calculator(f"(1/3)**{MAX_BITS // 2 + 1}")
    assert calculator("1" + "+1" * 199 + " ") == "200"
    with pytest.raises(ToolError, match="longer than 400 characters"):
        calculator("1" + "+1" * 200)
    assert (calculator("1e400/1e400"), calculator("1e-400*1e400")) == ("1", "1")
    for number in ("1e401", "1e-401"):
        with pytest.raises(ToolError, match="too large"):
            calculator(number)


class ShoutingParser:
    """Calls are words in capitals."""

    close_marker = "!"

    def parse(self, text: str) -> ParsedTurn:
        return ParsedTurn(content="", calls=[ToolCall(name=word, arguments={}) for word in text.split()])


def shouting() -> ShoutingParser:
    return ShoutingParser()


@pytest.mark.parametrize("name", ["ShoutingParser", "shouting"])
def test_a_parser_may_be_a_class_or_a_function_of_the_users(name):
    parser = make_parser(f"{__name__}:{name}", [])
    assert parser.close_marker == "!"
    assert parser.parse("A B").calls == [ToolCall(name="A", arguments={}), ToolCall(name="B", arguments={})]


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("no_such_module:parser", "no module no_such_module"),
        ("slimrl.agent.parsers:NoCall", "has no NoCall. Did you mean NoCalls?"),
        (f"{__name__}:scale", "scale: must be callable without arguments: missing a required argument: 'value'"),
        ("os:getcwd", "os:getcwd returns str; a parser has close_marker and parse"),
    ],
)
def test_an_import_path_that_makes_no_parser_is_refused(path, problem):
    with pytest.raises(ValueError, match=re.escape(problem)):
        make_parser(path, [])


class Colour(enum.Enum):
    red = "red"
    blue = "blue"


@dataclasses.dataclass
class Point:
    x: int
    title: float = 0.5


class Node(typing.TypedDict):
    children: list["Node"]


def paint(colour: Colour, where: list[Point], episode: EpisodeInfo, times: int | None = None) -> str:
    """Paint.

    Args:
        colour: In this colour.
        where: There.
        times: So often.
    """
    episode.scratch["painted"] = [colour.name, where[0].title]
    return f"{episode.prompt.label} {episode.seed} {colour.value} {where[0].x} {times}"


def grow(node: Node) -> str:
    """Grow.

    Args:
        node: The first.
    """
    return str(node)


async def test_types_with_parts_are_described_and_made_and_the_episode_is_given():
    made = make_tool(paint)
    assert made.schema["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "colour": {"type": "string", "enum": ["red", "blue"], "description": "In this colour."},
            "where": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"x": {"type": "integer"}, "title": {"type": "number", "default": 0.5}},
                    "required": ["x"],
                },
                "description": "There.",
            },
            "times": {"type": "integer", "nullable": True, "description": "So often."},
        },
        "required": ["colour", "where"],
    }
    info = EpisodeInfo(prompt=Prompt(prompt_id="p", messages=[], label="door"), seed=3, scratch={})
    arguments = {"colour": "blue", "where": [{"x": 4}], "episode": "mine"}
    answer = await ToolBox([made]).call("paint", arguments, 5, info)
    assert answer == ToolAnswer(text="door 3 blue 4 None")
    assert info.scratch == {"painted": ["blue", 0.5]}
    with pytest.raises(ToolError, match=r"colour: .*'red' or 'blue'"):
        await ToolBox([made]).call("paint", {**arguments, "colour": "green"}, 5, info)


def test_a_type_that_refers_to_itself_makes_no_tool():
    with pytest.raises(ValueError, match="Node refers to itself"):
        make_tool(grow)


async def test_a_pure_tool_runs_once_for_the_same_arguments_and_only_answers_are_kept():
    ran = []

    @tool(pure=True)
    def double(x: int, y: int = 0) -> int:
        """Double.

        Args:
            x: This.
            y: And this.
        """
        ran.append(x)
        if x < 0:
            raise ToolError("negative")
        return 2 * x + y

    box = ToolBox([make_tool(double)])
    assert box.caches
    assert not TOOLS.caches
    first, again = [await box.call("double", given, 5) for given in ({"x": 2, "y": 1}, {"y": 1, "x": 2})]
    assert (first, again) == (ToolAnswer(text="5"), ToolAnswer(text="5", from_cache=True))
    assert (await box.call("double", {"x": 3}, 5)).text == "6"
    for _ in range(2):
        with pytest.raises(ToolError, match="negative"):
            await box.call("double", {"x": -1}, 5)
    assert ran == [2, 3, -1, -1]


async def test_a_pure_tool_forgets_what_was_longest_not_asked_for(monkeypatch):
    monkeypatch.setattr(tools, "CACHED_ANSWERS", 2)
    box = ToolBox([make_tool(tool(pure=True)(scale))])
    given = [{"value": value} for value in (1, 2, 1, 3, 1, 2)]
    assert [(await box.call("scale", one, 5)).from_cache for one in given] == [False, False, True, False, True, False]
    del scale.tool_options


async def test_a_tool_is_tried_again_after_a_crash_as_often_as_it_says():
    tries = []

    @tool(retries=2)
    async def flaky(until: int) -> str:
        """Flake.

        Args:
            until: Attempts that fail.
        """
        tries.append(until)
        if len(tries) <= until:
            raise ConnectionError("reset")
        return "done"

    box = ToolBox([make_tool(flaky)])
    assert (await box.call("flaky", {"until": 2}, 5)).text == "done"
    assert len(tries) == 3
    tries.clear()
    with pytest.raises(ToolCrash, match="reset"):
        await box.call("flaky", {"until": 3}, 5)
    assert len(tries) == 3


def test_a_pure_tool_that_gets_the_episode_is_refused():
    with pytest.raises(ValueError, match="not pure, since it gets the episode"):
        make_tool(tool(pure=True)(paint))
    del paint.tool_options


def test_how_warm_the_cache_is_does_not_change_what_is_written_to_files():
    @tool(pure=True)
    def length(word: str) -> int:
        """Length.

        Args:
            word: Of this.
        """
        return len(word)

    box = ToolBox([make_tool(length)])

    def play() -> Trajectory:
        runner = runner_of(call_text("length", word="four"), f"4.{END}", tools=box)
        return asyncio.run(played(runner))

    cold, warm = play(), play()
    assert to_json(cold) == to_json(warm)
    assert [one.measured["tool_cache_hit_fraction"] for one in (cold, warm)] == [0.0, 1.0]
    assert [environment_metrics([one])["env/tool_cache_hit_fraction"] for one in (cold, warm)] == [0.0, 1.0]


async def test_tools_end_with_their_episode_even_if_what_it_kept_does_not_close():
    class Kept:
        async def close(self) -> None:
            raise OSError("gone")

    class Counted(ToolBox):
        num_ended = 0

        async def end_episode(self) -> None:
            self.num_ended += 1

    async def opened() -> Kept:
        return Kept()

    environment = ToolEnvironment(tools := Counted([]), AgentConfig(), 5.0)
    await environment.start(PROMPT, seed=0, scratch={})
    await environment.info.kept("session", opened)
    with pytest.raises(OSError, match="gone"):
        await environment.close()
    assert tools.num_ended == 1


class Letters(pydantic.BaseModel):
    text: str = pydantic.Field(pattern=r"^\p{L}+$")


def test_a_pattern_that_python_cannot_read_is_refused_where_the_tool_is_made():
    def spell(word: Letters) -> str:
        """Spell.

        Args:
            word: of letters
        """
        return word.text

    with pytest.raises(ValueError, match=r"the pattern '\^\\\\p\{L\}\+\$' cannot be judged"):
        make_tool(spell)
