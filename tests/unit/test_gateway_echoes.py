"""Answers that clients give back in other words: which are the policy's own, and which begin a segment."""

import json
from typing import Any

import pytest
from gateway_agents import (
    ANSWER,
    CALL,
    TOKENIZER,
    TOOL,
    ScriptedEngine,
    assert_every_sample_is_trained_once,
    decode,
    encode,
    trained,
)
from test_gateway import NEXT, QUESTION, RESULT, Post, asked, called, chat, tool_with

from slimrl.config.schema.agent import HistoryMode

ANY = tool_with({"type": "object"})


def call_of(arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'calculator', 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize(
    ("sampled", "given"),
    [
        (call_of({"x": 2**53 + 1}), called(f'{{"x": {2**53}}}')),
        (call_of({"x": [-(10**21) - 1]}), called('{"x": [-1e+21]}')),
        (call_of({"x": 123456789012345678}), called('{"x": 123456789012345680}')),
        (call_of({"a": None, "b": {"c": None, "d": [None]}}), called('{"b": {"d": [null]}}')),
        ("I call.\n" + call_of({"a": 1}), called('{"a": 1}')),
        ("I\r\ncall.\r\n" + call_of({"a": 1}), {**called('{"a": 1}'), "content": "I\ncall."}),
        ("I call.\n" + call_of({"a": 1}), {**called('{"a": 1}'), "content": " I call.\n"}),
    ],
)
async def test_what_a_client_changes_unmeant_stays_one_segment(sampled: str, given: dict[str, Any]):
    """And the recorded tokens are the policy's own."""

    async def act(post: Post) -> None:
        await chat(post, QUESTION, tools=[ANY])
        said = await chat(post, QUESTION, given, RESULT, tools=[ANY])
        await chat(post, QUESTION, given, RESULT, said, NEXT, tools=[ANY])

    engine = ScriptedEngine([sampled, ANSWER, ANSWER])
    trajectory, _ = await asked(engine, act)
    assert [tokens for tokens, _ in trained(trajectory)] == [encode(sampled) + encode(ANSWER) * 2]
    assert_every_sample_is_trained_once(trajectory, engine)


@pytest.mark.parametrize(
    ("sampled", "given"),
    [
        (call_of({"x": 2**53 - 1}), called(f'{{"x": {2**53}}}')),
        (call_of({"x": [None]}), called('{"x": []}')),
        (call_of({"x": None}), called('{"x": 0}')),
        (call_of({"x": True}), called('{"x": 1}')),
        (call_of({"x": [0]}), called('{"x": [false]}')),
        ("I call.\n" + call_of({"a": 1}), {**called('{"a": 1}'), "content": "I"}),
        ("I call.\n" + call_of({"a": 1}), {"role": "assistant", "content": "I call."}),
        ("I call.<|im_end|>", {"role": "assistant", "content": ""}),
    ],
)
async def test_what_it_changes_otherwise_begins_a_segment(sampled: str, given: dict[str, Any]):
    async def act(post: Post) -> None:
        await chat(post, QUESTION, tools=[ANY])
        await chat(post, QUESTION, given, RESULT if "tool_calls" in given else NEXT, tools=[ANY])

    trajectory, _ = await asked(ScriptedEngine([sampled, ANSWER]), act)
    assert [tokens for tokens, _ in trained(trajectory)] == [encode(sampled), encode(ANSWER)]


async def test_words_that_are_left_out_tell_no_sample_from_another():
    async def act(post: Post) -> None:
        await post(messages=[QUESTION], n=2, tools=[TOOL])
        await chat(post, QUESTION, called(), RESULT, tools=[TOOL])
        await chat(post, QUESTION, {**called(), "content": "B"}, RESULT, tools=[TOOL])

    trajectory, _ = await asked(ScriptedEngine(["A" + CALL, "B" + CALL, "1<|im_end|>", "2<|im_end|>"]), act)
    assert [tokens for tokens, _ in trained(trajectory)] == [
        encode("A" + CALL), encode("B" + CALL) + encode("2<|im_end|>"), encode("1<|im_end|>")
    ]  # fmt: skip


CODE, END = "Thought: add.\n<code>\nprint(34*17+2)\n", "</code>"


async def conversation(post: Post, added: str) -> list[Any]:
    """Three turns that the stop text ends, each given back with that text and more behind it."""
    messages = [QUESTION]
    for number in range(3):
        said = await chat(post, *messages, stop=["Observation:", END])
        assert END not in said["content"]
        given = {"role": "assistant", "content": said["content"] + END + added}
        messages += [given, {"role": "user", "content": f"Observation: {number}"}]
    return messages


@pytest.mark.parametrize("added", ["", "\nCalling tools:\n[{'id': 'call_1'}]", "\n<|im_end|>x"])
async def test_words_behind_a_stop_text_are_told_and_not_trained(added: str):
    """The context is what the template writes of the client's conversation, and the policy's tokens are its own."""

    async def act(post: Post) -> None:
        seen.append(await conversation(post, added))

    seen: list[Any] = []
    engine = ScriptedEngine([CODE.rstrip() + END] * 3)
    trajectory, _ = await asked(engine, act)
    assert [tokens for tokens, _ in trained(trajectory)] == [encode(CODE.rstrip() + END) * 3]
    assert_every_sample_is_trained_once(trajectory, engine)
    said = [message["content"] for message in trajectory.messages if message["role"] == "assistant"]
    behind = END + added if added else ""
    assert said == [CODE.strip() + behind] * 2 + [CODE.strip()]
    assert len(said) == trajectory.num_turns
    text = TOKENIZER.apply_chat_template(seen[0][:-2], tokenize=False, add_generation_prompt=True)
    assert decode(engine.requests[2].input_ids) == text.replace("<|im_end|>x", "< |im_end|>x")


async def test_a_turn_without_its_stop_text_begins_a_segment():
    async def act(post: Post) -> None:
        said = await chat(post, QUESTION, stop=[END])
        await chat(post, QUESTION, said, NEXT)

    trajectory, _ = await asked(ScriptedEngine([CODE + END, ANSWER]), act)
    assert len(trajectory.segments) == 2


async def test_a_template_that_writes_histories_writes_these_too():
    async def act(post: Post) -> None:
        await conversation(post, "\nCalling tools:")

    trajectory, _ = await asked(ScriptedEngine([CODE + END] * 3), act, history=HistoryMode.template)
    assert len(trajectory.segments) == 3
