"""Episodes and examples of each family of models, against what transformers renders of the same messages."""

import json
import re
from pathlib import Path

import pytest
from chat_table import tables
from chat_templates import MODELS
from chat_texts import (
    PLAYED,
    QUESTION,
    TOOLS,
    Script,
    answer_end,
    answer_text,
    call_end,
    call_text,
    parser_of,
    play,
    rendering,
    thought_text,
)

from slimrl.agent.dialogue import make_dialogue
from slimrl.agent.parsers import make_parser
from slimrl.agent.tool_call import ToolCall
from slimrl.agent.tools import ToolAnswer
from slimrl.data.trajectory import Status
from slimrl.rollout.task.dialogue import load_parser

KEYS = PLAYED
WHOLE = [key for key in KEYS if key not in ("deepseek_r1", "deepseek_v3", "hermes3", "kimi_k2_0711", "qwq")]
"""Those whose templates write each later turn of an episode as the policy does"""
ODD = "Größe 三 \U0001f600"


def encoded(key: str, text: str) -> list[int]:
    return MODELS[key].tokenizer()(text, add_special_tokens=False).input_ids


def opens_thinking(key: str) -> bool:
    """Whether the header of a turn does"""
    return MODELS[key].thought.startswith("{}")


def three_turns(key: str) -> tuple[str, str, str]:
    """A call, two calls at once if the model makes such, and an answer."""
    second = [{"a": 3, "b": 3}, {"a": -1, "b": 7, "note": ODD}][: 1 + MODELS[key].parallel]
    return (
        thought_text(key, "First the sum.") + call_text(key, {"a": 1, "b": 2}) + call_end(key),
        thought_text(key, "Now twice.", after_tools=True) + call_text(key, *second, first_id=1) + call_end(key),
        thought_text(key, "Done.", after_tools=True) + answer_text(key, "It is 3, then 6.") + answer_end(key),
    )


@pytest.mark.parametrize("key", WHOLE)
def test_each_context_of_an_episode_is_what_the_template_renders_of_its_messages(key):
    engine = Script(MODELS[key], *three_turns(key))
    trajectory = play(MODELS[key], engine)
    assert trajectory.status is Status.completed
    assert len(trajectory.segments) == 1
    answers = [number for number, message in enumerate(trajectory.messages) if message["role"] == "assistant"]
    rendered = [rendering(key, trajectory.messages[:number], generate=True) for number in answers]
    expected = [encoded(key, text) for text in rendered]
    if MODELS[key].rewrites:
        # What was shown and said stays; what follows it is as rendered.
        for number in (1, 2):
            turn = three_turns(key)[number - 1].rpartition("</think>")[2]
            following = rendered[number].rpartition(turn)[2]
            expected[number] = engine.contexts[number - 1] + engine.said[number - 1] + encoded(key, following)
    assert engine.contexts == expected
    segment = trajectory.segments[0]
    assert segment.tokens[segment.loss_mask].tolist() == [token for turn in engine.said for token in turn]
    assert segment.tokens.tolist() == engine.contexts[-1] + engine.said[-1]


@pytest.mark.parametrize("key", KEYS)
def test_messages_have_the_thinking_the_calls_and_the_words(key):
    trajectory = play(MODELS[key], Script(MODELS[key], *three_turns(key)))
    said = [message for message in trajectory.messages if message["role"] == "assistant"]
    thoughts = [message.get("reasoning_content") for message in said]
    if not MODELS[key].thought:
        assert thoughts == [None, None, None]
    elif MODELS[key].thought_after_results == "":
        assert thoughts == ["First the sum.", None, None]
    else:
        assert thoughts == ["First the sum.", "Now twice.", "Done."]
    calls = [call["function"] for message in said for call in message.get("tool_calls", ())]
    expected = [{"a": 1, "b": 2}, {"a": 3, "b": 3}, {"a": -1, "b": 7, "note": ODD}]
    assert calls == [{"name": "add", "arguments": arguments} for arguments in expected[: len(calls)]]
    assert len(calls) == 2 + MODELS[key].parallel
    results = [message["content"] for message in trajectory.messages if message["role"] == "tool"]
    assert results == ["3", "6", f"6{ODD}"][: len(calls)]
    assert said[-1]["content"] == "It is 3, then 6."
    assert trajectory.metadata["num_malformed_calls"] == 0


@pytest.mark.parametrize("key", KEYS)
def test_any_of_the_models_stop_tokens_ends_an_answer(key):
    for stop in MODELS[key].stops:
        trajectory = play(MODELS[key], Script(MODELS[key], answer_text(key, "Six.") + stop))
        assert trajectory.status is Status.completed
        if not opens_thinking(key):
            assert trajectory.messages[-1]["content"] == "Six."


@pytest.mark.parametrize("key", KEYS)
def test_a_turn_that_is_cut_in_its_call_is_truncated_and_its_tokens_kept(key):
    whole = encoded(key, thought_text(key, "Sum.") + call_text(key, {"a": 1, "b": 2}))
    engine = Script(MODELS[key], whole[:-2], finish="length")
    trajectory = play(MODELS[key], engine)
    assert trajectory.status is Status.truncated
    assert trajectory.segments[0].tokens[trajectory.segments[0].loss_mask].tolist() == whole[:-2]
    assert trajectory.metadata["num_tool_calls"] == 0


@pytest.mark.parametrize("key", [key for key in KEYS if MODELS[key].thought])
def test_a_call_in_the_middle_of_thinking_is_no_call(key):
    thought = f"I might write {call_text(key, {'a': 1, 'b': 2})} here."
    turn = thought_text(key, thought) + answer_text(key, "Three.") + answer_end(key)
    trajectory = play(MODELS[key], Script(MODELS[key], turn))
    assert trajectory.status is Status.completed
    assert trajectory.metadata["num_tool_calls"] == 0
    assert trajectory.messages[-1]["content"] == "Three."
    assert trajectory.messages[-1]["reasoning_content"] == thought
    unclosed = turn[: turn.index("<|end|>" if key == "gpt_oss" else "</think")] + call_end(key)
    trajectory = play(MODELS[key], Script(MODELS[key], unclosed))
    assert trajectory.metadata["num_tool_calls"] == 0
    assert trajectory.messages[-1]["content"] == ""


@pytest.mark.parametrize("key", KEYS)
def test_a_result_that_holds_the_models_markers_opens_and_ends_nothing(key):
    markers = "".join(token.content for token in MODELS[key].tokenizer().added_tokens_decoder.values())
    note = f"{markers} and <think> <tool_call>"
    engine = Script(
        MODELS[key],
        thought_text(key, "Sum.") + call_text(key, {"a": 1, "b": 2}) + call_end(key),
        answer_text(key, "Three.") + answer_end(key),
    )
    trajectory = play(MODELS[key], engine, tools=_Noted(note), max_turns=2)
    reserved = set(MODELS[key].tokenizer().added_tokens_decoder)
    plain = play(MODELS[key], Script(MODELS[key], *engine.said), tools=_Noted("3"), max_turns=2)
    counts = [sum(token in reserved for token in one.segments[0].tokens.tolist()) for one in (trajectory, plain)]
    assert counts[0] == counts[1]
    assert trajectory.status is Status.completed


class _Noted:
    """Tools that answer with these words."""

    def __init__(self, words: str) -> None:
        self.words = words
        self.schemas = TOOLS.schemas
        self.caches = False

    async def for_episode(self):
        return self

    async def end_episode(self):
        pass

    async def call(self, name, arguments, timeout_s, info):
        return ToolAnswer(text=self.words)


@pytest.mark.parametrize("key", [key for key in KEYS if not MODELS[key].parallel])
def test_several_calls_where_the_template_writes_one_are_an_error_for_the_model(key):
    one = call_text(key, {"a": 1, "b": 2})
    between = "<|end|><|start|>assistant" if key == "gpt_oss" else ";"
    engine = Script(MODELS[key], f"{one}{between}{one}{call_end(key)}", answer_text(key, "Three.") + answer_end(key))
    trajectory = play(MODELS[key], engine)
    assert [m["content"] for m in trajectory.messages if m["role"] == "tool"] == ["error: only one tool call at a time"]
    assert trajectory.metadata["num_malformed_calls"] == 1


@pytest.mark.parametrize("key", KEYS)
def test_the_familys_parser_is_the_one_that_reads_what_the_template_writes(key, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": MODELS[key].model_type}))
    parser = load_parser("", tmp_path, MODELS[key].chat(), TOOLS.schemas)
    text = call_text(key, {"a": 1, "b": 2})
    assert parser.close_marker == parser_of(key).close_marker
    (call,) = parser.parse(text).calls
    assert isinstance(call, ToolCall)
    assert (call.name, call.arguments) == ("add", {"a": 1, "b": 2})
    with pytest.raises(ValueError, match="does not read the calls that the chat template writes"):
        load_parser("mistral", tmp_path, MODELS[key].chat(), TOOLS.schemas)


def test_a_family_without_calls_of_its_own_takes_the_parser_that_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "olmoe"}))
    chat = MODELS["qwen25"].chat()
    with pytest.raises(ValueError, match="no parser is known for models of olmoe; name that of the template's calls"):
        load_parser("", tmp_path, chat, TOOLS.schemas)
    assert len(load_parser("qwen25", tmp_path, chat, TOOLS.schemas).parse(call_text("qwen25", {"a": 1})).calls) == 1
    with pytest.raises(ValueError, match="the chat template writes no tool calls"):
        load_parser("", tmp_path, MODELS["olmoe"].chat(), TOOLS.schemas)


REFUSED_AS_EXAMPLES = {"deepseek_v31_think": 1, "deepseek_r1": 1, "qwq": 1, "deepseek_v3": 3, "hermes3": 3,
                        "kimi_k2_thinking": 6, "gpt_oss": 5}  # fmt: skip
"""Which message the template does not write behind its prompt"""


@pytest.mark.parametrize("key", [key for key in KEYS if key != "kimi_k2_0711"])
def test_examples_learn_from_what_a_policy_would_have_written_and_from_nothing_else(key):
    """One sequence, or one for each turn that the template writes differently later on."""
    chat = MODELS[key].chat()
    turns = three_turns(key)
    trajectory = play(MODELS[key], Script(MODELS[key], *turns))
    if key in REFUSED_AS_EXAMPLES:
        number = REFUSED_AS_EXAMPLES[key]
        with pytest.raises(ValueError, match=rf"messages\[{number}\]: .* renders a prompt differently"):
            chat.training_sequences(trajectory.messages, TOOLS.schemas)
        return
    sequences = chat.training_sequences(trajectory.messages, TOOLS.schemas)
    learned = [
        chat.template.decode([token for token, bit in zip(tokens, mask, strict=True) if bit])
        for tokens, mask in sequences
    ]
    assert "".join(learned) == "".join(turns)
    assert len(sequences) == (3 if key == "qwen3_no_think" else 1)


@pytest.mark.parametrize(
    ("key", "segments"),
    [
        ("qwen3", 1),
        ("qwen3_thinking", 1),
        ("qwen35", 1),
        ("qwen35_no_think", 1),
        ("qwen36", 1),
        ("qwen3_no_think", 3),
        ("deepseek_v31_think", 2),
        ("qwq", 3),
        ("deepseek_v3", 2),
        ("deepseek_r1", 3),
        ("hermes3", 2),
        ("kimi_k2_0711", 2),
        ("kimi_k2_thinking", 1),
        ("glm47", 1),
    ],
)
def test_history_by_the_template_starts_a_segment_where_an_earlier_turn_is_written_anew(key, segments):
    engine = Script(MODELS[key], *three_turns(key))
    trajectory = play(MODELS[key], engine, history="template")
    assert trajectory.status is Status.completed
    assert len(trajectory.segments) == segments
    answers = [number for number, message in enumerate(trajectory.messages) if message["role"] == "assistant"]
    assert engine.contexts == [
        encoded(key, rendering(key, trajectory.messages[:number], generate=True)) for number in answers
    ]
    sampled = [token for one in trajectory.segments for token in one.tokens[one.loss_mask].tolist()]
    assert sampled == [token for turn in engine.said for token in turn]
    turns = [sorted(set(one.turn_ids[one.loss_mask].tolist())) for one in trajectory.segments]
    assert [turn for part in turns for turn in part] == [0, 1, 2]


def test_what_follows_a_call_is_written_as_behind_a_first_one():
    """DeepSeek-V3-0324 and R1 write it differently from the second call on: they leave out what opens the calls and the
    results, and what closes the results before a call."""
    for key in ("deepseek_v3", "deepseek_r1"):
        engine = Script(MODELS[key], *three_turns(key))
        trajectory = play(MODELS[key], engine)
        results = [message["content"] for message in trajectory.messages if message["role"] == "tool"]
        for number, place in ((1, results[:1]), (2, results[1:])):
            inner = "".join(f"<｜tool▁output▁begin｜>{result}<｜tool▁output▁end｜>" for result in place)
            added = encoded(key, f"<｜tool▁outputs▁begin｜>{inner}<｜tool▁outputs▁end｜>")
            assert engine.contexts[number] == engine.contexts[number - 1] + engine.said[number - 1] + added
        written = rendering(key, trajectory.messages[:-1], generate=True)
        assert written.count("<｜tool▁calls▁begin｜>") == written.count("<｜tool▁outputs▁begin｜>") == 1
        assert written.count("<｜tool▁calls▁end｜>") == 2


def test_results_bear_the_ids_that_the_policy_gave_its_calls_although_the_template_numbers_those_anew():
    """Kimi-K2 of July 2025 numbers the calls of each turn from 0."""
    key = "kimi_k2_0711"
    engine = Script(MODELS[key], *three_turns(key))
    trajectory = play(MODELS[key], engine)
    last = MODELS[key].tokenizer().decode(engine.contexts[2])
    assert re.findall(r"Return of (\S+)\n", last) == [f"functions.add:{number}" for number in range(3)]
    assert re.findall(r"call_begin\|>(\S+?)<", last) == [f"functions.add:{number}" for number in range(3)]
    written = rendering(key, trajectory.messages[:-1], generate=True)
    assert re.findall(r"call_begin\|>(\S+?)<", written) == [f"functions.add:{number}" for number in (0, 0, 1)]


def test_a_question_after_an_answer_drops_the_thinking_before_it_as_serving_does():
    first = {"role": "assistant", "content": "Three.", "reasoning_content": "Sum."}
    messages = (QUESTION, first, {"role": "user", "content": "And now?"})
    for key in ("qwen3", "glm45", "glm46", "glm47", "qwen3_thinking", "qwen35", "qwen36"):
        engine = Script(MODELS[key], answer_text(key, "Six.") + answer_end(key))
        play(MODELS[key], engine, messages=messages)
        assert "Sum." not in MODELS[key].tokenizer().decode(engine.contexts[0])
        sequences = MODELS[key].chat().training_sequences([*messages, first], TOOLS.schemas)
        assert len(sequences) == 2


def test_a_closing_marker_of_several_tokens_lets_the_turn_go_on_to_its_end():
    """As with DeepSeek's tokenizer and calls in another family's format."""
    chat = MODELS["deepseek_v31"].chat()
    assert len(chat.template.encode("</tool_call>")) > 1
    for name, marker in (("qwen25", None), ("deepseekv31", "<｜tool▁call▁end｜>")):
        dialogue = make_dialogue(chat, TOOLS.schemas, make_parser(name, TOOLS.schemas), stop_at_call=True)
        added = [chat.token_id(marker)] if marker else []
        assert list(dialogue.stop_token_ids) == [*chat.stop_token_ids, *added]


@pytest.mark.parametrize("key", KEYS)
def test_an_episode_whose_turns_stop_at_their_calls_continues_as_the_template_writes_it(key):
    """What follows the end of a call, such as the end of all calls, then comes from the template."""
    model = MODELS[key]
    close = parser_of(key).close_marker
    whole = thought_text(key, "Sum.") + call_text(key, {"a": 1, "b": 2})
    # MiniMax-M2's has several tokens.
    stops = close and len(model.chat().template.encode(close)) == 1
    stopped = whole[: whole.rindex(close) + len(close)] if stops and close in whole else whole + call_end(key)
    engine = Script(model, stopped, thought_text(key, "Done.", after_tools=True) + "Three." + answer_end(key))
    trajectory = play(model, engine, stop_at_tool_call=True)
    assert trajectory.status is Status.completed
    assert trajectory.metadata["num_malformed_calls"] == 0
    ended = encoded(key, whole + call_end(key))
    other = Script(model, ended, thought_text(key, "Done.", after_tools=True) + "Three." + answer_end(key))
    play(model, other)
    assert engine.contexts == other.contexts


@pytest.mark.parametrize("key", ["qwen3", "qwen3_thinking"])
def test_a_turn_that_stops_at_a_call_within_its_thinking_goes_on(key):
    model = MODELS[key]
    opening = "" if key == "qwen3_thinking" else "<think>\n"
    first = f"{opening}I could write {call_text(key, {'a': 1, 'b': 2})}"
    second = f" or not.\n</think>\n\n{call_text(key, {'a': 3, 'b': 4})}"
    engine = Script(model, first, second, thought_text(key, "Done.") + "Seven." + answer_end(key))
    trajectory = play(model, engine, stop_at_tool_call=True)
    assert trajectory.status is Status.completed
    assert trajectory.metadata["num_tool_calls"] == 1
    assert trajectory.metadata["num_turns"] == 2
    assert [m["content"] for m in trajectory.messages if m["role"] == "tool"] == ["7"]
    assert engine.contexts[1] == engine.contexts[0] + engine.said[0]
    assert trajectory.messages[1]["reasoning_content"].startswith("I could write <tool_call>")
    (segment,) = trajectory.segments
    assert segment.tokens[segment.loss_mask].tolist() == [token for turn in engine.said for token in turn]


def test_an_example_whose_words_would_end_its_turn_is_refused():
    messages = [QUESTION, {"role": "assistant", "content": "The token <|endoftext|> ends documents."}]
    with pytest.raises(ValueError, match=r"messages\[1\]: its text holds '<.endoftext.>', which ends a turn"):
        MODELS["qwen3"].chat().training_sequences(messages, None)


@pytest.mark.parametrize("key", ["qwen3", "kimi_k2", "deepseek_v31", "glm45", "llama31"])
@pytest.mark.parametrize("history", ["keep", "template"])
def test_half_of_a_surrogate_pair_in_a_call_is_malformed_and_in_a_result_replaced(key, history):
    """Its escape, of six ordinary characters, is what a policy can write."""
    texts = [call_text(key, {"a": 1, "b": 2, "note": "SPOT"}).replace("SPOT", "\\ud800")]
    texts = [thought_text(key, "Sum.") + text + call_end(key) for text in texts]
    engine = Script(MODELS[key], *texts, answer_text(key, "Three.") + answer_end(key))
    trajectory = play(MODELS[key], engine, history=history)
    assert trajectory.status is Status.completed
    json.dumps(trajectory.messages, ensure_ascii=False).encode()
    engine = Script(MODELS[key], texts[0].replace("\\ud800", ""), answer_text(key, "Three.") + answer_end(key))
    trajectory = play(MODELS[key], engine, tools=_Noted("\ud800"), history=history)
    assert trajectory.messages[2]["content"] == "?"


def test_thinking_after_some_words_is_thinking_too_if_it_is_closed():
    key = "qwen3"
    inside = call_text(key, {"a": 1, "b": 2})
    trajectory = play(MODELS[key], Script(MODELS[key], f"Sure. <think>{inside}</think>No.<|im_end|>"))
    assert trajectory.metadata["num_tool_calls"] == 0
    assert trajectory.messages[-1]["content"] == "Sure. No."
    trajectory = play(MODELS[key], Script(MODELS[key], "The tag <think> opens it.<|im_end|>"))
    assert trajectory.messages[-1]["content"] == "The tag <think> opens it."


def test_the_tables_of_the_docs_are_what_the_templates_and_slimrl_do():
    page = (Path(__file__).parents[2] / "docs" / "chat.md").read_text()
    shown = re.findall(r"<!-- generated by tests/chat_table.py -->\n(.*?)\n<!-- end -->", page, re.DOTALL)
    assert shown == ["\n".join(table) for table in tables()]
