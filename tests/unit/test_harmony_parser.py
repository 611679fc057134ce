"""Calls of gpt-oss, as its model and its chat template write them, against the readings of OpenAI's own package.

The literal texts were written and read by openai_harmony 0.0.8. To compare random turns with it, install that version
and name a folder with OpenAI's vocabulary o200k_base.tiktoken in TIKTOKEN_ENCODINGS_BASE, which it would download.
"""

import json
import os
from random import Random

import pytest
from chat_templates import MODELS
from chat_texts import QUESTION, TOOLS, Script, play

from slimrl.agent.chat.channels import split_channels
from slimrl.agent.judged_call import UNREADABLE
from slimrl.agent.parsers import make_parser
from slimrl.agent.tool_call import MalformedCall, ToolCall
from slimrl.data.trajectory import Status

PARSER = make_parser("harmony", TOOLS.schemas)
THINKING = "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant"
CALLS = {
    "as the model writes it": "<|channel|>commentary to=functions.add <|constrain|>json<|message|>",
    "without a blank": "<|channel|>commentary to=functions.add<|constrain|>json<|message|>",
    "without a format": "<|channel|>commentary to=functions.add<|message|>",
    "as the chat template writes it": " to=functions.add<|channel|>commentary json<|message|>",
    "as openai_harmony renders it": " to=functions.add<|channel|>commentary <|constrain|>json<|message|>",
    "on the channel of thinking": "<|channel|>analysis to=functions.add code<|message|>",
}
GOOD = ToolCall(name="add", arguments={"a": 1, "b": 2})
JUDGED = bool(os.environ.get("TIKTOKEN_ENCODINGS_BASE"))


def read(turn: str):
    """(thinking, words, calls) of a turn without the token that ended it"""
    thought = split_channels(turn)
    parsed = PARSER.parse(thought.answer)
    return thought.thinking, parsed.content, parsed.calls


@pytest.mark.parametrize("header", CALLS)
def test_a_call_is_read_whichever_way_its_header_is_written(header):
    call = f'{CALLS[header]}{{"a": 1, "b": 2}}'
    assert read(f"{THINKING}{call}") == ("I add.", "", [GOOD])
    assert read(call) == (None, "", [GOOD])
    said = "<|channel|>commentary<|message|>First the sum.<|end|><|start|>assistant"
    assert read(f"{THINKING}{said}{call}") == ("I add.", "First the sum.", [GOOD])
    behind = "<|end|><|start|>assistant<|channel|>final<|message|>Three."
    assert read(f"{call}{behind}") == (None, "Three.", [GOOD])
    assert read(f"{call}<|end|><|start|>assistant{call}") == (None, "", [GOOD, GOOD])


@pytest.mark.parametrize(
    ("turn", "problem"),
    [
        ("<|channel|>commentary to=functions.add", UNREADABLE),
        (" to=functions.add<|channel|>commentary json", UNREADABLE),
        ('<|channel|>commentary to=functions.add json<|message|>{"a": 1', UNREADABLE),
        ("<|channel|>commentary to=functions.add json<|message|>one and two", UNREADABLE),
        (
            '<|channel|>commentary to=functions.add json<|message|>{"a": 1}',
            "malformed tool call: arguments: 'b' is a req",
        ),
        ("<|channel|>commentary to=functions.add json<|message|>", "malformed tool call: arguments: 'a' is a req"),
        ("<|channel|>commentary to=functions.sub json<|message|>{}", "unknown tool sub; known: add"),
        ("<|channel|>analysis to=python code<|message|>1 + 2", "unknown tool python; known: add"),
    ],
)
def test_a_broken_call_is_malformed_and_says_why(turn, problem):
    _, _, (call,) = read(THINKING + turn)
    assert isinstance(call, MalformedCall)
    assert call.problem.startswith(problem)


@pytest.mark.parametrize(
    ("turn", "thinking", "words"),
    [
        ("<|channel|>final<|message|>Write to=functions.add for it.", None, "Write to=functions.add for it."),
        ("<|channel|>analysis<|message|>I could write to=functions.add<|message|>{}", "I could write "
         "to=functions.add<|message|>{}", ""),
        ("<|channel|>commentary to=assistant<|message|>a note", None, "a note"),
        ("<|message|>no channel", None, "no channel"),
        ("words alone", None, "words alone"),
        ("<|channel|>final<|message|>x to=functions.add<|message|>{}", None, "x to=functions.add<|message|>{}"),
        ("", None, ""),
    ],
)  # fmt: skip
def test_what_has_no_recipient_is_no_call(turn, thinking, words):
    assert read(turn) == (thinking, words, [])


@pytest.mark.parametrize("header", ["as the model writes it", "as the chat template writes it"])
@pytest.mark.parametrize("history", ["keep", "template"])
def test_an_episode_keeps_the_tokens_of_a_call_and_goes_on_behind_them(header, history):
    """By the template the call is shown in its own spelling, in a segment of its own if the policy's was another."""
    model = MODELS["gpt_oss"]
    turns = (
        f'{THINKING}{CALLS[header]}{{"a": 1, "b": 2}}<|call|>',
        "<|channel|>analysis<|message|>Three.<|end|><|start|>assistant<|channel|>final<|message|>It is 3.<|return|>",
    )
    engine = Script(model, *turns)
    trajectory = play(model, engine, history=history)
    assert trajectory.status is Status.completed
    asked, called, told, said = trajectory.messages
    assert asked == QUESTION
    assert called["reasoning_content"] == "I add."
    assert called["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1, "b": 2}}
    assert (told["content"], said["content"], said["reasoning_content"]) == ("3", "It is 3.", "Three.")
    result = '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"3"<|end|><|start|>assistant'
    written = header == "as the chat template writes it"
    assert len(trajectory.segments) == (1 if history == "keep" or written else 2)
    decoded = model.tokenizer().decode(engine.contexts[1])
    if len(trajectory.segments) == 1:
        assert engine.contexts[1] == engine.contexts[0] + engine.said[0] + model.chat().template.encode(result)
    else:
        shown = f'{THINKING}{CALLS["as the chat template writes it"]}{{"a": 1, "b": 2}}<|call|>{result}'
        assert decoded == model.tokenizer().decode(engine.contexts[0]) + shown


def test_the_thinking_of_messages_is_shown_under_the_key_that_the_template_reads():
    chat = MODELS["gpt_oss"].chat()
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    turn = {"role": "assistant", "content": "First the sum.", "reasoning_content": "I add.", "tool_calls": [call]}
    text = chat.template.render([QUESTION, turn], TOOLS.schemas, generate=False)
    both = (
        "<|start|>assistant<|channel|>analysis<|message|>I add.\nFirst the sum.<|end|><|start|>assistant to=functions."
    )
    assert both in text
    answer = {"role": "assistant", "content": "a", "reasoning_content": "t"}
    ((tokens, mask),) = chat.training_sequences([QUESTION, answer], None)
    learned = chat.template.decode([token for token, learn in zip(tokens, mask, strict=True) if learn])
    assert learned == ("<|channel|>analysis<|message|>t<|end|><|start|>assistant<|channel|>final<|message|>a<|return|>")


@pytest.mark.skipif(not JUDGED, reason="TIKTOKEN_ENCODINGS_BASE names no folder with OpenAI's vocabulary")
def test_random_turns_are_read_as_openai_harmony_reads_them():
    harmony = pytest.importorskip("openai_harmony")
    encoding = harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    random, called = Random(0), 0
    for _ in range(2000):
        said = []
        for _ in range(random.randrange(1, 5)):
            message = harmony.Message.from_role_and_content(harmony.Role.ASSISTANT, random.choice(_WORDS))
            message = message.with_channel(random.choice(("analysis", "analysis", "commentary", "final")))
            if random.random() < 0.4:
                arguments = {"a": random.randrange(9), "b": random.randrange(9), "note": random.choice(_WORDS)}
                message.content[0].text = json.dumps(arguments, ensure_ascii=random.random() < 0.5)
                message = message.with_recipient("functions.add").with_channel(
                    random.choice(("commentary", "analysis"))
                )
                message = message.with_content_type(random.choice(("json", "<|constrain|>json", "code")))
            said.append(message)
        tokens = [token for message in said for token in encoding.render(message)]
        turn = encoding.decode(tokens).removeprefix("<|start|>assistant")
        if random.random() < 0.5:
            # As the model writes it: behind the channel.
            turn = turn.replace(" to=functions.add<|channel|>commentary", "<|channel|>commentary to=functions.add")
        known = encoding.parse_messages_from_completion_tokens(
            encoding.encode(turn, allowed_special="all"), harmony.Role.ASSISTANT
        )
        thinking = [one for one in known if one.channel == "analysis" and one.recipient is None]
        words = [one for one in known if one.channel != "analysis" and one.recipient is None]
        calls = [one for one in known if one.recipient is not None]
        assert len(known) == len(said)
        ours = read(_without_last_end(turn))
        assert ours[0] == ("\n".join(_text(one).strip() for one in thinking) if thinking else None)
        assert ours[1] == "\n".join(filter(None, map(_text, words))).strip()
        assert [call.arguments for call in ours[2]] == [json.loads(_text(one)) for one in calls]
        assert all(one.recipient == "functions.add" for one in calls)
        called += len(calls)
    assert called > 1000


_WORDS = (
    "",
    "Hi",
    " two words ",
    "lines\n\nof text",
    "{'a': 1}",
    "to=functions.add",
    "Größe 三 \U0001f600",
    "a < b > c",
)


def _text(message) -> str:
    return message.content[0].text


def _without_last_end(turn: str) -> str:
    for end in ("<|return|>", "<|call|>", "<|end|>"):
        turn = turn.removesuffix(end)
    return turn
