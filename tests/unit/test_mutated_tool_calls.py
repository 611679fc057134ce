"""Mutated turns through every parser of calls and of thinking: no call is made up, none takes long, nothing is raised.

A parser of SGLang may take longer than its limit of CPU time on a hostile text; then BoundedParser ends its process and
the turn is a malformed call (tests/integration/test_parser_process.py). Those that slimrl wrote never do.
"""

import json
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

import pytest
from chat_texts import TOOLS
from tool_call_mutations import PIECES, mutated_turn, whole_calls

from slimrl.agent.chat.channels import split_channels
from slimrl.agent.chat.thinking import PLAIN, Tags, split_thinking
from slimrl.agent.parser_process import CPU_LIMIT_S
from slimrl.agent.parsers import Parser, make_parser
from slimrl.agent.tool_call import MalformedCall, ToolCall
from slimrl.base.jsonl import MAX_DEPTH
from slimrl.config.agent_rules import HARMONY
from slimrl.config.package_fields import tool_call_parsers

PARSERS = (HARMONY, *sorted(set(tool_call_parsers()) - {"response_template"}))
ALL = 100_000
"""Turns over all parsers, in the full matrices; a tenth of them is read in each run of the tests"""
LARGE = 0.01
"""Share of turns with a part of a hundred kilobytes or more"""
MOST_LATE = 0.004
"""Share of turns that SGLang's parsers may leave to their limit of CPU time"""
LINEAR_S = 0.5
"""CPU time that our own parsers may take for a turn of up to a megabyte"""


@pytest.mark.parametrize("name", PARSERS)
def test_a_mutated_call_is_one_of_its_text_or_malformed(name: str):
    read_mutants(name, ALL // 10 // len(PARSERS) + 1, seed="short")


@pytest.mark.full
@pytest.mark.parametrize("name", PARSERS)
def test_a_hundred_thousand_mutated_calls_are_of_their_text_or_malformed(name: str):
    read_mutants(name, ALL // len(PARSERS) + 1, seed="full")


def read_mutants(name: str, number: int, seed: str) -> None:
    parser, rng, late, called = make_parser(name, TOOLS.schemas), Random(f"{seed} {name}"), 0, 0
    markers, calls = markers_of(parser), whole_calls()
    own = [call for call in calls if any(isinstance(one, ToolCall) for one in parser.parse(call).calls)] or calls
    for _ in range(number):
        text = mutated_turn(rng, own if rng.random() < 0.7 else calls, markers, large=rng.random() < LARGE)
        try:
            with cpu_limit(CPU_LIMIT_S):
                turn = parser.parse(text)
        except OverLimit:
            late += 1
            continue
        assert is_left_of(turn.content, text), f"{turn.content!r} of {text!r}"
        for call in turn.calls:
            if isinstance(call, ToolCall):
                called += 1
                assert_of_text(call, text)
            else:
                assert isinstance(call, MalformedCall)
                assert call.problem
                assert call.name in ("", "add")
    assert late <= (0 if name == HARMONY else 1 + MOST_LATE * number)
    assert called >= number // 50 or own is calls, "mutants without a call left test little"


@pytest.mark.parametrize("kind", ["plain", "suffixed", "channels"])
def test_thinking_and_answer_are_parts_of_the_turn(kind: str):
    rng, calls = Random(f"thinking {kind}"), whole_calls()
    tags = Tags("<think:opensource>", "</think:opensource>") if kind == "suffixed" else PLAIN
    for _ in range(3000):
        text = mutated_turn(
            rng, calls, [*tags, "<|channel|>analysis<|message|>", "<|end|>"], large=rng.random() < LARGE
        )
        opened, started = rng.random() < 0.5, time.thread_time()
        thought = split_channels(text) if kind == "channels" else split_thinking(text, opened=opened, tags=tags)
        assert time.thread_time() - started < LINEAR_S
        for part in (thought.thinking or "", thought.answer):
            assert said_in(part, text), f"{part!r} of {text!r}"
        assert thought.closed or kind == "channels" or thought.answer == ""


@pytest.mark.parametrize("piece", ["<think></think>", "<think>", "</think>", "<think>x</think>y", *PIECES[-12:]])
def test_thinking_that_repeats_itself_takes_no_time(piece: str):
    text, started = piece * (1_000_000 // len(piece)), time.thread_time()
    split_thinking(text, opened=False)
    split_channels(text)
    assert time.thread_time() - started < LINEAR_S


@pytest.mark.parametrize(
    "piece",
    ["<|start|>assistant", "<|message|>", "<|channel|>", "to=functions.add", " to=", "<|call|>",
     "<|channel|>commentary to=x<|message|>{",
     "<|start|>assistant to=functions.add<|channel|>commentary<|message|>{}<|call|>", '{"a":', "[", "\n\t "],
)  # fmt: skip
def test_a_turn_of_channels_that_repeats_itself_takes_no_time(piece: str):
    parser, text = make_parser(HARMONY, TOOLS.schemas), piece * (1_000_000 // len(piece))
    started = time.thread_time()
    split_channels(text)
    parser.parse(text)
    assert time.thread_time() - started < 3


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("name", [HARMONY, "hermes", "deepseekv31"])
def test_a_number_that_json_does_not_have_is_malformed(name: str, value: str):
    """A JSON schema takes any of them for a number."""
    schema = {"type": "function", "function": {"name": "half", "parameters": {"properties": {"x": {"type": "number"}}}}}
    sections = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
    written = {
        HARMONY: " to=functions.half<|channel|>commentary json<|message|>{}",
        "hermes": '<tool_call>\n{"name": "half", "arguments": {}}\n</tool_call>',
        "deepseekv31": sections.replace("{}", "<｜tool▁call▁begin｜>half<｜tool▁sep｜>{}<｜tool▁call▁end｜>"),
    }[name]
    parser = make_parser(name, [schema])
    (call,) = parser.parse(written.replace("{}", '{"x": 1.5}')).calls
    assert call == ToolCall(name="half", arguments={"x": 1.5})
    (call,) = parser.parse(written.replace("{}", f'{{"x": {value}}}')).calls
    assert isinstance(call, MalformedCall)


class OverLimit(BaseException):
    """Not an Exception, which SGLangParser takes for one of SGLang's."""


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    def end(*_: object) -> None:
        raise OverLimit

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def markers_of(parser: Parser) -> list[str]:
    """What SGLang's parser of the format calls its tokens."""
    if not hasattr(parser, "_parser"):
        return list(parser.all_markers)
    fields = vars(parser._parser().detector).items()
    return [value for name, value in fields if isinstance(value, str) and value and "regex" not in name]


def assert_of_text(call: ToolCall, text: str) -> None:
    """A call has the tool's name, and arguments of its types that stand in the text."""
    assert call.name == "add"
    assert call.name in text
    assert isinstance(call.arguments, dict)
    json.dumps(call.arguments, ensure_ascii=False, allow_nan=False).encode()
    assert {"a", "b"} <= call.arguments.keys()
    assert all(is_integer(call.arguments[name]) for name in "ab"), call
    assert isinstance(call.arguments.get("note", ""), str)
    for value in leaves(call.arguments):
        assert said_in(str(value), text) or is_number_of(value, text), f"{value!r} of {text!r}"


def is_integer(value: object) -> bool:
    """As JSON Schema says it: 1e2 is one."""
    return not isinstance(value, bool) and isinstance(value, int | float) and value == int(value)


def is_number_of(value: object, text: str) -> bool:
    """Whether a text has the number in another form: 1e2, or 0x10 where SGLang reads values as Python does."""
    if isinstance(value, float):
        return value in map(float, NUMBERS.findall(text))
    return isinstance(value, int) and value in (int(one, 16) for one in HEXADECIMAL.findall(text))


def is_left_of(part: str, text: str) -> bool:
    """Whether a part is what is left of a text after some of it is taken out, blanks aside."""
    letters = iter(text)
    return all(letter in letters for letter in part if not letter.isspace())


def leaves(value: object, depth: int = 0) -> Iterator[object]:
    assert depth < MAX_DEPTH
    if isinstance(value, dict):
        for key, one in value.items():
            yield key
            yield from leaves(one, depth + 1)
    elif isinstance(value, list):
        for one in value:
            yield from leaves(one, depth + 1)
    else:
        yield value


ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})")
NUMBERS = re.compile(r"-?\d{1,50}(?:\.\d+)?(?:[eE][-+]?\d{1,3})?")
HEXADECIMAL = re.compile(r"-?0[xX][0-9a-fA-F]+")
WORDS = re.compile(r"\w+")


def said_in(part: str, text: str) -> bool:
    """Whether the words of a part stand in a text, in any form of JSON or Python."""
    if part in text:
        return True
    plain = ESCAPE.sub(lambda found: chr(int(found[1], 16)), text).encode("utf-16", "surrogatepass")
    known = f"{text}{plain.decode('utf-16', 'replace')}".casefold()
    return all(word in known for word in WORDS.findall(part.casefold()))
