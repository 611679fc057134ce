"""SGLang's parsers through ours: good calls are read, everything broken is a malformed call, never an exception."""

import json
import os
import re
import socket
import subprocess
import sys
import time

import jsonschema
import pytest
from chat_templates import MODELS
from chat_texts import PLAYED, TOOLS, call_text
from chat_texts import parser_of as parser_of_model
from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.hunyuan_detector import HunyuanDetector

from slimrl.agent.parsers import make_parser
from slimrl.agent.sglang_parser import MARKERS, NOT_CLOSED, NOT_OPENED, UNREADABLE
from slimrl.agent.tool_call import MalformedCall, ToolCall
from slimrl.config.package_fields import tool_call_parsers

KEYS = {"qwen25": "qwen3", "hermes": "qwen3", "glm45": "glm45", "deepseekv3": "deepseek_v3",
        "deepseekv31": "deepseek_v31", "kimi_k2": "kimi_k2", "minimax-m2": "minimax_m2",
        "hunyuan": "hy3_preview"}  # fmt: skip
"""Parser -> a model of chat_texts.py that writes so."""
GOOD, OTHER = {"a": 1, "b": 2}, {"a": 3, "b": 4, "note": "x } ] </b> \\ \" '"}

CODER = "<tool_call>\n<function=add>\n{}\n</function>\n</tool_call>"
PARSERS = (*KEYS, "qwen3_coder", "glm47")
AS_TAGS = {"glm45", "glm47", "hunyuan", "minimax-m2", "qwen3_coder"}
"""Formats whose arguments are plain text between tags, not JSON."""


def parser_of(name):
    return make_parser(name, TOOLS.schemas)


def written(name, arguments, first_id=0):
    """A call in a parser's format."""
    if name == "qwen3_coder":
        parts = [f"<parameter={key}>\n{value}\n</parameter>" for key, value in arguments.items()]
        return CODER.format("\n".join(parts))
    if name == "glm47":
        pairs = (f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in arguments.items())
        return f"<tool_call>add{''.join(pairs)}</tool_call>"
    return call_text(KEYS[name], arguments, first_id=first_id).strip()


def broken_texts(name):
    """At least twelve for each parser."""
    markers = MARKERS[name]
    good = written(name, GOOD)
    body = good[good.index(markers.open) + len(markers.open) : good.rindex(markers.close)]

    def around(text):
        return f"{markers.section_open}{markers.open}{text}{markers.close}{markers.section_close}"

    # In GLM's formats what comes first is the name of a tool, whatever it says.
    unreadable = "" if name in ("glm45", "glm47", "hunyuan") else UNREADABLE
    yield "nothing inside", around(""), unreadable
    yield "only white space", around("  \n "), unreadable
    yield "no closing", good[: good.rindex(markers.close)], NOT_CLOSED
    yield "only the opening", markers.section_open + markers.open, NOT_CLOSED
    yield "only the closing", markers.close, NOT_OPENED
    yield "another one opened inside", f"{markers.section_open}{markers.open}{body}{markers.open}", NOT_CLOSED
    yield "words", around("\nplease add one and two\n"), unreadable
    yield "unknown tool", good.replace("add", "subtract"), "unknown tool subtract; known: add"
    yield "a list", around("\n[1]\n"), unreadable
    yield "deep nesting", around("\n" + "[" * 100_000 + "\n"), unreadable
    yield "a number", around("\n17\n"), unreadable
    yield "a surrogate", around("\n\ud800\n"), unreadable
    yield "cut in the middle", around(body[: len(body) // 2]), ""
    renamed = [('"b"', '"c"'), ("<arg_key>b", "<arg_key>c"), ("<parameter=b", "<parameter=c")]
    missing = good
    for old, new in renamed:
        missing = missing.replace(old, new)
    yield "a missing argument", missing, "'b' is a required"
    if name not in AS_TAGS:
        yield "an argument of another type", good.replace('"a": 1', '"a": "one"'), "a: 'one' is not of type 'integer'"
        yield "arguments that are no object", good.replace('{"a": 1, "b": 2}', "[1, 2]"), ""
        yield "arguments that are null", good.replace('{"a": 1, "b": 2}', "null"), ""
        yield "arguments cut short", good.replace('"b": 2}', '"b": 2'), UNREADABLE
        yield "arguments in single quotes", good.replace('"a"', "'a'"), UNREADABLE
    else:
        another = good.replace(">1<", ">one<").replace("\n1\n", "\none\n")
        yield "an argument of another type", another, "a: 'one' is not of type 'integer'"
        yield "a key that is not closed", re.sub('</arg_key>|(?<==a)>|(?<="a")>', "", good), ""
        yield "a value that is not closed", re.sub("(?<=1)\n?</(arg_value|parameter)>", "one", good), ""


BROKEN = [(name, *rest) for name in PARSERS for rest in broken_texts(name)]


@pytest.mark.parametrize(("name", "kind", "text", "problem"), BROKEN, ids=[f"{n}-{kind}" for n, kind, *_ in BROKEN])
def test_a_broken_call_is_malformed_and_says_why(name, kind, text, problem):
    calls = parser_of(name).parse(text).calls
    assert [type(call) for call in calls][-1:] == [MalformedCall]
    assert problem in calls[-1].problem
    assert not any(isinstance(call, ToolCall) for call in calls)


def test_markers_are_spelt_as_the_models_tokenizer_has_them():
    """SGLang's server makes its parser with the tokenizer; here with a model's whose markers have a suffix."""
    key, plain = "hy3", call_text("hy3_preview", GOOD)
    text = f"Words. {call_text(key, GOOD, OTHER)}"
    turn = parser_of_model(key).parse(text)
    assert [call.arguments for call in turn.calls] == [GOOD, OTHER]
    assert turn.content == "Words."
    server = HunyuanDetector(MODELS[key].tokenizer())
    tools = [Tool(**schema) for schema in TOOLS.schemas]
    assert [json.loads(call.parameters) for call in server.detect_and_parse(text, tools).calls] == [GOOD, OTHER]
    assert server.detect_and_parse(plain, tools).calls == parser_of_model(key).parse(plain).calls == []
    (call,) = parser_of_model(key).parse(call_text(key, GOOD).replace("</tool_call:opensource>", "</tool_call>")).calls
    assert isinstance(call, MalformedCall)


def test_each_parser_meets_at_least_twelve_broken_texts():
    assert all(sum(one == name for one, *_ in BROKEN) >= 12 for name in PARSERS)


@pytest.mark.parametrize("name", PARSERS)
def test_a_broken_call_hides_none_of_the_good_ones_around_it(name):
    markers = MARKERS[name]
    good, other = written(name, GOOD), written(name, OTHER, first_id=7)
    start, stop = len(markers.section_open), -len(markers.section_close) or None
    calls = (good[start:stop], f"{markers.open}\nnothing\n{markers.close}", other[start:stop])
    text = f"Words. {markers.section_open}{''.join(calls)}{markers.section_close}"
    turn = parser_of(name).parse(text)
    assert turn.content == "Words."
    assert [type(call) for call in turn.calls] == [ToolCall, MalformedCall, ToolCall]
    assert [call.arguments for call in turn.calls if isinstance(call, ToolCall)] == [GOOD, OTHER]


@pytest.mark.parametrize("name", PARSERS)
def test_text_without_calls_has_none(name):
    turn = parser_of(name).parse("It is 3 < 4, {braces} and [brackets].")
    assert turn.calls == []
    assert turn.content == "It is 3 < 4, {braces} and [brackets]."


def test_kimis_ids_are_kept_as_they_were_written():
    text = call_text("kimi_k2", GOOD, OTHER, first_id=4)
    assert [call.id for call in parser_of("kimi_k2").parse(text).calls] == ["functions.add:4", "functions.add:5"]


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "add", "parameters": {"a": 1, "b": 2}}', [GOOD]),
        ('<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}', [GOOD]),
        ('{"name": "add", "parameters": {"a": 1', []),
        ('<|python_tag|>add(1, 2)', None),
        ('{"name": "add", "parameters": "1"}', None),
        ('{"name": 3, "parameters": {}}', []),
        ('{"parameters": {"a": 1}}', []),
        ("{" * 5000, []),
        ('{"name": "add"}', None),
        ('<|python_tag|>', None),
        ('{"name": "mul", "parameters": {"a": 1, "b": 2}}', None),
        ('{"name": "add", "parameters": {"a": "x", "b": 2}}', None),
        ('{"name": "add", "parameters": {"a": null, "b": 2}}', None),
        ('{"name": "add", "parameters": [1, 2]}', None),
        ("The answer is 3.", []),
    ],
)  # fmt: skip
def test_a_format_without_markers_is_parsed_whole(text, calls):
    read = make_parser("llama3", TOOLS.schemas).parse(text).calls
    if calls is None:
        assert [type(call) for call in read] == [MalformedCall]
    else:
        assert [call.arguments for call in read] == calls


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("[add(a=1, b=2)]", [GOOD]),
        ("Sure: [add(a=1, b=2), add(a=3, b=4)]", [GOOD, {"a": 3, "b": 4}]),
        ("[add(a=1, b=2", []),
        ("[add(a=1 b=2)]", []),
        ("[add()]", None),
        ("[add(a=1)]", None),
        ("[add(a='one', b=2)]", None),
        ("[add(a=None, b=2)]", None),
        ("[sub(a=1, b=2)]", None),
        ("[add(a=x, b=2)]", None),
        ("[add(a=1, b=2, c=3.)]", [GOOD | {"c": 3.0}]),
        ("[add(a=[1], b=2)]", None),
        ("[add(a={'x': 1}, b=2)]", None),
        ("[add(a=1, a=2, b=2)]", [{"a": 2, "b": 2}]),
        ("[add(**x)]", []),
        ("The list [1, 2] is short.", []),
    ],
)
def test_calls_that_look_like_pythons_are_parsed_whole(text, calls):
    """Text that is no list of calls at all is an answer."""
    read = make_parser("pythonic", TOOLS.schemas).parse(text).calls
    if calls is None:
        assert [type(call) for call in read] == [MalformedCall]
    else:
        assert [call.arguments for call in read] == calls


@pytest.mark.parametrize("name", sorted(set(tool_call_parsers()) - {"response_template"}))
def test_every_parser_of_sglang_can_be_named_and_raises_nothing(name):
    parser = make_parser(name, TOOLS.schemas)
    for key in PLAYED:
        for text in (call_text(key, GOOD), call_text(key, GOOD)[:-3], f"{MODELS[key].stops[0]}[1]{{", ""):
            assert parser.parse(text) is not None


def test_a_parser_that_needs_more_than_the_tools_is_refused():
    with pytest.raises(ValueError, match="response_template cannot be used here"):
        make_parser("response_template", TOOLS.schemas)


def test_the_parsers_are_imported_without_the_rest_of_sglang():
    code = (
        "import sys\n"
        "from slimrl.agent.parsers import make_parser\n"
        "make_parser('qwen25', []).parse('<tool_call>')\n"
        "assert not [m for m in sys.modules if m.split('.')[0] in ('sglang', 'triton', 'sgl_kernel')]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_glms_arguments_are_respelt_as_sglang_does_it():
    (call,) = parser_of("glm45").parse(call_text("glm45", GOOD | {"note": "true"})).calls
    assert call.arguments == GOOD | {"note": "True"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("glm45", "<tool_call>add\n" + "<arg_key>a</arg_key>\n<arg_value>" * 2000 + "</tool_call>"),
        ("glm47", "<tool_call>add" + "<arg_key>a</arg_key><arg_value>" * 2000 + "</tool_call>"),
        ("glm45", "<tool_call>add\n" + "<arg_key>" * 8000 + "</tool_call>"),
        ("pythonic", "[A(A=" + "\t)A(A=,\t" * 30),
        ("pythonic", "[" * 100_000),
    ],
    ids=range(5),
)
def test_text_that_repeats_itself_takes_no_time(name, text):
    start = time.thread_time()
    assert not any(isinstance(call, ToolCall) for call in parser_of(name).parse(text).calls)
    assert time.thread_time() - start < 1


@pytest.mark.parametrize("name", ["qwen25", "kimi_k2"])
def test_what_no_file_could_hold_is_malformed(name):
    deep = "[" * 60 + "]" * 60
    (call,) = parser_of(name).parse(written(name, GOOD).replace('"b": 2', f'"b": 2, "y": {deep}')).calls
    assert call == MalformedCall(problem=UNREADABLE, name="add")
    (call,) = parser_of(name).parse(written(name, GOOD).replace("add", "\\ud800")).calls
    assert isinstance(call, MalformedCall)
    call.problem.encode()


def test_a_marker_within_an_argument_is_read_as_sglang_reads_it():
    (call,) = parser_of("qwen25").parse(written("qwen25", GOOD | {"note": "<tool_call>"})).calls
    assert call == ToolCall(name="add", arguments=GOOD | {"note": "<tool_call>"})


@pytest.mark.parametrize(
    "value",
    ["<parameters><a>1</a></parameters>", "see <parameter> here", "<parameter", "</parameters", "<parameter name="],
)
def test_a_parameter_that_speaks_of_parameters_is_read_as_sglang_reads_it(value):
    parser, text = parser_of("minimax-m2"), written("minimax-m2", GOOD | {"note": value})
    (call,) = parser.parse(text).calls
    _, (item,) = parser._parser().parse_non_stream(text)
    assert call == ToolCall(name="add", arguments=json.loads(item.parameters))
    assert call.arguments == GOOD | {"note": value}


@pytest.mark.parametrize("value", ["one</parameter>two", '<parameter name="b">5', "</parameter>"])
def test_a_parameter_that_ends_or_begins_within_another_is_malformed(value):
    (call,) = parser_of("minimax-m2").parse(written("minimax-m2", GOOD | {"note": value})).calls
    assert isinstance(call, MalformedCall)


def test_a_broken_call_leaves_nothing_in_the_environment():
    before = dict(os.environ)
    for text in ("[1]", '{"name": 5, "arguments": {}}'):
        parser_of("qwen25").parse(f"<tool_call>\n{text}\n</tool_call>")
    assert dict(os.environ) == before


def with_parameter(schema):
    parameters = {"type": "object", "properties": {"x": schema}}
    return [{"type": "function", "function": {"name": "add", "description": "", "parameters": parameters}}]


def test_parameters_that_no_call_can_be_judged_by_are_refused_before_there_is_one():
    with pytest.raises(ValueError, match="the parameters of add are no JSON schema"):
        make_parser("qwen25", with_parameter({"type": "text"}))


def test_a_pattern_that_python_cannot_read_is_not_judged():
    parser = make_parser("qwen25", with_parameter({"type": "string", "pattern": "\\p{L}+"}))
    called = '<tool_call>\n{"name": "add", "arguments": {"x": %s}}\n</tool_call>'
    assert parser.parse(called % '"1"').calls[0].arguments == {"x": "1"}
    assert isinstance(parser.parse(called % "1").calls[0], MalformedCall)


def test_a_schema_that_refers_to_an_address_downloads_nothing():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = server.getsockname()[1]
        parser = make_parser("qwen25", with_parameter({"$ref": f"http://127.0.0.1:{port}/x"}))
        with pytest.raises(jsonschema.exceptions._WrappedReferencingError):
            parser.parse('<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>')
        with pytest.raises(TimeoutError):
            server.accept()
