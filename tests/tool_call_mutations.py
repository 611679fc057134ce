"""Turns with calls of `add` in the formats of many models, whole and changed by seed."""

import json
from collections.abc import Sequence
from random import Random

from chat_texts import WRITTEN_CALLS

ARGUMENTS = (
    {"a": 1, "b": 2},
    {"a": 3, "b": 4, "note": "x } ] </b> \\ \" '"},
    {"a": -5, "b": 0, "note": "Größe 三 \U0001f600\n\ttwo  lines"},
    {"a": 12345678901234567, "b": 7, "note": ""},
)
_JSON_FORMS = (
    '[TOOL_CALLS] [{"name": "add", "arguments": %s}]', "[TOOL_CALLS]add[ARGS]%s",
    '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "add", "parameters": %s}]<|END_ACTION|>',
    '<|action_start|> <|plugin|>\n{"name": "add", "parameters": %s}<|action_end|>',
    '<|tools_prefix|>[{"add": %s}]<|tools_suffix|>', 'function call<|role_sep|>\n{"name": "add", "arguments": %s}',
    '<iquest_tool_call>{"name": "add", "arguments": %s}</iquest_tool_call>',
    '<|content_invoke_tool_json|>{"name": "add", "args": %s}<|end_message|>',
    '<dots_function_call>{"name": "add", "arguments": %s}</dots_function_call>',
    '<|start|>assistant<|channel|>commentary to=functions.add<|constrain|>json<|message|>%s<|call|>',
    '<|python_tag|>{"name": "add", "parameters": %s}',
)  # fmt: skip
"""Formats whose arguments are JSON"""
_TAGS = (
    ("<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name=\"add\">",
     '<steptml:parameter name="%s">%s</steptml:parameter>',
     "</steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>"),
    ('<function name="add">', '<param name="%s">%s</param>', "</function>"),
    ("<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"add\">\n",
     '<｜DSML｜parameter name="%s" string="false">%s</｜DSML｜parameter>\n',
     "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"),
    ("<atem:function_calls><atem:invoke name=\"add\">", '<atem:parameter name="%s">%s</atem:parameter>',
     "</atem:invoke></atem:function_calls>"),
    ("<|tool_call_start|>[add(", "%s=%s,", ")]<|tool_call_end|>"),
    ("[add(", "%s=%s,", ")]"),
    ("<|tool_call>call:add{", "%s:%s,", "}<tool_call|>"),
)  # fmt: skip
"""Formats with a key and a value for each argument: what stands before, around and behind them"""

PIECES = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_calls>", "<arg_key>", "</arg_value>", "<parameter=a>",
    "</parameter>", "<function=add>", '<invoke name="add">', "<|tool_call_begin|>", "<｜tool▁call▁begin｜>",
    "<|channel|>", "<|message|>", "<|start|>assistant", "<|end|>", "to=functions.add", "```json\n",
    "[", "]", "{", "}", '"', "'", "\\",
    ":", ",", "=", "(", ")", '{"name": "add", "arguments": ', '"arguments": {}', "NaN", "Infinity", "-Infinity",
    "1e999", "\\ud800", "\\udc00", "\ud800", "\udfff", "\\u0000", "\x00", "\x1b[31m", "\r",
    "\u2028", "\ufeff", "\u202e",
    "null", "true",
    '"a": 1', '"a": 2, "a": 3', "9" * 5000, "-0", "0x10", "add", "sub", "__class__", "%s", "{0}", "&lt;", "]]>",
    "<![CDATA[",
)  # fmt: skip
VALUES = (
    "NaN",
    "Infinity",
    "1e999",
    "null",
    "true",
    "[1]",
    '{"x": 1}',
    '"1"',
    "1.0",
    "1.5",
    "9" * 5000,
    "1e2",
    "'1'",
    "",
)


def whole_calls() -> list[str]:
    """Calls in every format, each with all ARGUMENTS."""
    calls = []
    for arguments in ARGUMENTS:
        calls += [write((arguments,), 0) for write in WRITTEN_CALLS.values()]
        calls += [form % json.dumps(arguments, ensure_ascii=ascii) for form in _JSON_FORMS for ascii in (True, False)]
        for before, around, behind in _TAGS:
            quoted = around.endswith(",")
            pairs = (around % (key, json.dumps(value) if quoted else value) for key, value in arguments.items())
            calls.append(before + "".join(pairs) + behind)
    return calls


def mutated_turn(rng: Random, calls: Sequence[str], markers: Sequence[str], *, large: bool) -> str:
    """A turn with one or two calls, changed once to four times.

    Args:
        calls: to choose from.
        markers: of the parser that will read it.
        large: with a part of a hundred kilobytes to a megabyte.
    """
    words = rng.choice(["", "Let me see. ", "<think>\nWell.\n</think>\n\n", "Two\n\n"])
    text = words + "".join(rng.choices(calls, k=rng.choice([1, 1, 1, 2])))
    for _ in range(rng.randint(1, 4)):
        text = _changed(rng, text, markers)
    return _enlarged(rng, text, markers) if large else text


def _changed(rng: Random, text: str, markers: Sequence[str]) -> str:
    place, other = sorted(rng.randrange(len(text) + 1) for _ in range(2))
    match rng.randrange(9):
        case 0:
            return text[:place]
        case 1:
            return text[place:]
        case 2:
            return text[:place] + text[other:]
        case 3:
            return text[:other] + text[place:other] + text[other:]
        case 4:
            return text[:place] + text[place + 1 : place + 2] + text[place : place + 1] + text[place + 2 :]
        case 5:
            return text[:place] + rng.choice(VALUES) + text[place + 1 :]
        case 6:
            letter = rng.choice("[]{}\"'<>")
            return text.replace(letter, letter * 2)
        case _:
            return text[:place] + rng.choice([*PIECES, *markers]) + text[place:]


def _enlarged(rng: Random, text: str, markers: Sequence[str]) -> str:
    place, piece = rng.randrange(len(text) + 1), rng.choice([*PIECES, *markers])
    match rng.randrange(4):
        case 0:
            part = "[" * 10_000 + "]" * 10_000
        case 1:
            part = '{"a":' * 10_000
        case 2:
            part = "x" * 1_000_000
        case _:
            part = piece * (100_000 // len(piece))
    return text[:place] + part + text[place:]
