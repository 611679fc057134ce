"""Nothing that goes into a rendering is lost: what a template leaves out is refused, and what it only respells is not.

Each template shows one behaviour of a published one.
"""

import json
from functools import partial
from pathlib import Path

import pytest
from slimrl_tools.toy.toy_tokenizer import build_tokenizer
from typer.testing import CliRunner

from slimrl.agent.calculator import calculator
from slimrl.agent.chat.chat_format import ChatFormat
from slimrl.agent.chat.template import ChatTemplate
from slimrl.agent.conversation import Conversation
from slimrl.agent.dialogue import make_dialogue
from slimrl.agent.parsers import NoCalls
from slimrl.agent.tools import make_tool
from slimrl.cli import app
from slimrl.config.load import load_recipe
from slimrl.config.problems import RecipeError
from slimrl.config.schema.agent import AgentConfig
from slimrl.config.schema.rollout import RolloutConfig, SamplingConfig
from slimrl.data.prompts import read_conversations
from slimrl.rollout.task.task import load_task

TINY = Path(__file__).parents[2] / "recipes" / "tiny_moe" / "gspo_calculator.yaml"
CALCULATOR = make_tool(calculator).schema
CHATTY = {
    "type": "function",
    "function": {
        "name": "say",
        "description": 'Say "words",\nas in «Größe».',
        "parameters": {
            "type": "object",
            "properties": {
                "words": {"type": "string", "description": "Which ones.", "enum": ["a\tb", "c"]},
                "how": {"type": "object", "properties": {"volume": {"type": "number", "description": "From 0 to 11."}}},
            },
        },
    },
}

SHOW_TOOLS = "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
THINK = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
WORDS = "{{ m.content }}"
CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} "
    "{{ c.function.arguments | tojson }}</tool_call>{% endfor %}"
)
OTHERS = "{{ m.content }}"


def template(*, tools=SHOW_TOOLS, think=THINK, words=WORDS, calls=CALLS, others=OTHERS) -> str:
    """A template that writes everything, but for what is given in its place."""
    return (
        f"{tools}{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n"
        f"{{% if m.role == 'assistant' %}}{think}{words}{calls}{{% else %}}{others}{{% endif %}}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def chat_of(text: str | dict[str, str]) -> ChatFormat:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = text
    return ChatFormat(ChatTemplate(tokenizer), [tokenizer.eos_token_id])


def calling(arguments=None, *, content="", name="calculator", **more):
    """A turn that calls a tool; `more` goes into its message."""
    function = {"name": name, "arguments": {"expression": "12 * 34"} if arguments is None else arguments}
    return {"role": "assistant", "content": content, "tool_calls": [{"function": function}], **more}


USER = {"role": "user", "content": "What is 12 * 34?"}
RESULT = {"role": "tool", "content": "408"}
ANSWER = {"role": "assistant", "content": "\\boxed{408}"}
THOUGHTFUL = {**ANSWER, "reasoning_content": "Twelve times 34."}
SHOWN_BY_THE_PAGE = [USER, calling(), RESULT, ANSWER]
"""The row of docs/data_formats.md"""


def learned(chat: ChatFormat, messages, tools=None) -> str:
    sequences = chat.training_sequences(messages, tools)
    return "".join(
        chat.template.decode([token for token, bit in zip(tokens, mask, strict=True) if bit])
        for tokens, mask in sequences
    )


def test_a_template_that_writes_everything_loses_nothing():
    chat = chat_of(template())
    row = [{"role": "system", "content": "Be brief."}, USER, calling(content="I compute."), RESULT, THOUGHTFUL]
    said = learned(chat, row, [CALCULATOR])
    assert said == (
        'I compute.<tool_call>calculator {"expression": "12 * 34"}</tool_call><|im_end|>'
        "<think>Twelve times 34.</think>\\boxed{408}<|im_end|>"
    )


LOSSES = {
    "no calls, so that an empty answer would be learned (Moonlight, Llama-3, SmolLM2)": (
        {"calls": ""},
        SHOWN_BY_THE_PAGE,
        r"messages\[1\]: .* leaves out the name of tool_calls\[0\]; the arguments of tool_calls\[0\]",
    ),
    "no words beside a call (Llama-3.1)": (
        {"words": "{% if not m.tool_calls %}{{ m.content }}{% endif %}"},
        [USER, calling(content="I compute."), RESULT, ANSWER],
        r"messages\[1\]: .* leaves out its words\.",
    ),
    "words that stand in the arguments too": (
        {"words": "{% if not m.tool_calls %}{{ m.content }}{% endif %}"},
        [USER, calling(content="12"), RESULT, ANSWER],
        r"messages\[1\]: .* leaves out its words\.",
    ),
    "no thinking (nine families)": ({"think": ""}, [USER, THOUGHTFUL], r"messages\[1\]: .* leaves out its thinking\."),
    "thinking that stands in the answer too": (
        {"think": ""},
        [USER, {**ANSWER, "reasoning_content": "408"}],
        r"messages\[1\]: .* leaves out its thinking\.",
    ),
    "no thinking of turns that call (DeepSeek-V3.1)": (
        {"think": "{% if not m.tool_calls %}" + THINK + "{% endif %}"},
        [USER, calling(reasoning_content="Let me."), RESULT, THOUGHTFUL],
        r"messages\[1\]: .* leaves out its thinking\.",
    ),
    "the second call": (
        {"calls": CALLS.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")},
        [USER, {**calling(), "tool_calls": calling()["tool_calls"] * 2}, RESULT, RESULT, ANSWER],
        r"messages\[1\]: .* leaves out the name of tool_calls\[1\]",
    ),
    "the arguments": (
        {"calls": "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}</tool_call>{% endfor %}"},
        SHOWN_BY_THE_PAGE,
        r"messages\[1\]: .* leaves out the arguments of tool_calls\[0\]",
    ),
    "arguments that are null": (
        {
            "calls": "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{% for k, v in "
            "c.function.arguments.items() if v is not none %} {{ k }}={{ v }}{% endfor %}</tool_call>{% endfor %}"
        },
        [USER, calling({"expression": "1", "rounding": None}), RESULT, ANSWER],
        r"messages\[1\]: .* leaves out the arguments of tool_calls\[0\]",
    ),
    "a system message": (
        {"others": "{% if m.role != 'system' %}{{ m.content }}{% endif %}"},
        [{"role": "system", "content": "Be brief."}, USER, ANSWER],
        r"messages\[0\]: its words",
    ),
    "a tool's result": (
        {"others": "{% if m.role != 'tool' %}{{ m.content }}{% endif %}"},
        SHOWN_BY_THE_PAGE,
        r"messages\[2\]: its words",
    ),
    "thinking under a name of others": (
        {},
        [USER, {**ANSWER, "reasoning": "Twelve times 34."}],
        r"messages\[1\]: .* leaves out `reasoning`, which is `reasoning_content` in slimrl",
    ),
    "a call in OpenAI's first form": (
        {},
        [USER, {**ANSWER, "function_call": {"name": "calculator", "arguments": "{}"}}],
        r"messages\[1\]: .* leaves out `function_call`, which is `tool_calls` in slimrl",
    ),
}


@pytest.mark.parametrize("case", LOSSES)
def test_an_example_of_which_the_template_leaves_something_out_is_refused_with_its_name_and_a_remedy(case):
    changed, row, problem = LOSSES[case]
    with pytest.raises(ValueError, match=f"{problem}.*(model.chat_template|agent.tool_prompt)"):
        chat_of(template(**changed)).training_sequences(row, None)
    learned(chat_of(template()), [message for message in row if not {"reasoning", "function_call"} & set(message)])


@pytest.mark.parametrize("key", ["reasoning", "thinking"])
def test_thinking_that_a_server_gives_under_two_names_is_learned_once(key):
    said = learned(chat_of(template()), [USER, {**THOUGHTFUL, key: THOUGHTFUL["reasoning_content"]}])
    assert said == "<think>Twelve times 34.</think>\\boxed{408}<|im_end|>"
    with pytest.raises(ValueError, match=f"leaves out `{key}`, which is `reasoning_content` in slimrl"):
        learned(chat_of(template()), [USER, {**THOUGHTFUL, key: "Thirty-four times twelve."}])


@pytest.mark.parametrize("case", [case for case in LOSSES if "messages" in LOSSES[case][2][:9]])
def test_a_prompt_is_refused_for_the_same_but_for_earlier_thinking_which_serving_drops_too(case):
    changed, row, _ = LOSSES[case]
    chat = chat_of(template(**changed))
    prompt = [*row, USER]
    if "its thinking" in LOSSES[case][2]:
        chat.prompt(prompt, None, whole=True)
        return
    with pytest.raises(ValueError, match="the chat template leaves out "):
        chat.prompt(prompt, None, whole=True)


RESPELLED = {
    "trimmed": {"words": "{{ m.content | trim }}", "others": "{{ m.content | trim }}"},
    "results as JSON (Llama-3.1)": {"others": "{{ {'output': m.content} | tojson }}"},
    "JSON without spaces": {"calls": CALLS.replace("tojson", "tojson(separators=(',', ':'))")},
    "JSON beyond ASCII escaped": {"calls": CALLS.replace("tojson", "tojson(ensure_ascii=True)")},
    "indented": {"calls": CALLS.replace("tojson", "tojson(indent=4)")},
    "arguments as text within JSON": {"calls": CALLS.replace("| tojson", "| tojson | tojson")},
    "parameters as XML (Qwen3-Coder)": {
        "calls": "{% for c in m.tool_calls or [] %}<tool_call><function={{ c.function.name }}>{% for k, v in "
        "c.function.arguments.items() %}<parameter={{ k }}>\n{{ v | tojson if v is mapping or (v is iterable and v is "
        "not string) else v | string }}\n</parameter>{% endfor %}</tool_call>{% endfor %}"
    },
    "the call before its name": {
        "calls": "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments | tojson }} to "
        "{{ c.function.name }}</tool_call>{% endfor %}"
    },
    "arguments as text (DeepSeek)": {
        "calls": "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name + c.function.arguments }}</tool_call>"
        "{% endfor %}"
    },
}
ODD = {"text": ' a\n"b" \\ Größe 三 ', "n": 1.50, "yes": True, "nothing": None, "list": [1, {"k": "v\t"}], "empty": ""}


@pytest.mark.parametrize("case", RESPELLED)
@pytest.mark.parametrize("arguments", [ODD, json.dumps(ODD), {}], ids=["object", "text", "none"])
def test_what_a_template_only_respells_is_not_lost(case, arguments):
    row = [USER, calling(arguments, content=" Now. "), {"role": "tool", "content": ' {"a": "ä\n"} '}, THOUGHTFUL]
    assert "calculator" in learned(chat_of(template(**RESPELLED[case])), row, [CHATTY])


@pytest.mark.parametrize("case", ["indented", "arguments as text (DeepSeek)"])
def test_arguments_of_an_empty_text_are_none(case):
    """As streaming clients write a call without arguments."""
    chat = chat_of(template(**RESPELLED[case]))
    assert learned(chat, [USER, calling(""), RESULT, ANSWER]) == learned(chat, [USER, calling({}), RESULT, ANSWER])


SPLITS = (
    "{% set said = m.content.split('</think>') %}{% if said | length > 1 %}<think>\n{{ said[0].split('<think>')[-1] "
    "| trim }}\n</think>\n\n{% endif %}{{ said[-1] | trim }}"
)


@pytest.mark.parametrize(
    ("changed", "answer"),
    [
        ({"words": SPLITS}, "The tag </think> closes it."),
        ({"words": "{{ m.content.split('</think>')[-1] }}"}, "The tag </think> closes it."),
        ({}, "The tags <think> and </think> are a pair"),
    ],
)
def test_an_answer_that_holds_a_tag_of_thinking_is_refused_where_the_tag_changes_what_is_said(changed, answer):
    with pytest.raises(ValueError, match=r"messages\[1\]: its text holds '<think>' or '</think>'"):
        chat_of(template(**changed)).training_sequences([USER, {"role": "assistant", "content": answer}], None)


def test_thinking_that_holds_its_own_end_is_refused():
    row = [USER, {**ANSWER, "reasoning_content": "I close with </think> here."}]
    with pytest.raises(ValueError, match=r"messages\[1\]: its text holds '<think>' or '</think>'"):
        chat_of(template()).training_sequences(row, None)


def test_thinking_at_the_beginning_of_content_is_learned_as_thinking_or_refused():
    """As many published sets have it."""
    row = [USER, {"role": "assistant", "content": "<think>\nTwelve times 34.\n</think>\n\nIt is 408."}]
    assert learned(chat_of(template(words=SPLITS)), row) == row[1]["content"] + "<|im_end|>"
    assert learned(chat_of(template()), row) == row[1]["content"] + "<|im_end|>"
    with pytest.raises(ValueError, match=r"messages\[1\]: .* leaves out its thinking"):
        chat_of(template(words="{{ m.content.split('</think>')[-1] }}")).training_sequences(row, None)


def test_a_tag_in_an_answer_of_a_model_that_does_not_think_is_a_word():
    row = [USER, {"role": "assistant", "content": "The tag </think> closes it."}]
    assert learned(chat_of(template()), row) == "The tag </think> closes it.<|im_end|>"


BY_ID = (
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.id }} {{ c.function.arguments | tojson }}</tool_call>{% endfor %}"
)


@pytest.mark.parametrize("call_id", [None, "call_1"])
def test_calls_without_the_ids_that_stand_for_their_names_are_refused_with_such_ids(call_id):
    """As Kimi-K2 writes them."""
    row = [USER, calling(), RESULT, ANSWER]
    if call_id:
        row[1]["tool_calls"][0]["id"] = call_id
    problem = r"the name of tool_calls\[0\].* writes ids in place of names: .* such as functions\.NAME:0"
    with pytest.raises(ValueError, match=problem):
        chat_of(template(calls=BY_ID)).training_sequences(row, None)
    row[1]["tool_calls"][0]["id"] = "functions.calculator:0"
    assert "functions.calculator:0" in learned(chat_of(template(calls=BY_ID)), row)


@pytest.mark.parametrize("calls", [[], None])
def test_an_empty_list_of_calls_is_no_calls(calls):
    """DeepSeek-V3.1 asks whether there is a list, Llama-3.1 whether there is the key."""
    ends = "{% if m.tool_calls is defined %}<tool_call></tool_call>{% else %}{{ m.content }}{% endif %}"
    row = [USER, {**ANSWER, "tool_calls": calls, "reasoning_content": None, "name": None}]
    assert learned(chat_of(template(words=ends, calls="")), row) == "\\boxed{408}<|im_end|>"
    ends = "{% if 'tool_calls' in m %}{{ raise_exception('one call') }}{% endif %}{{ m.content }}"
    assert learned(chat_of(template(words=ends, calls="")), row) == "\\boxed{408}<|im_end|>"


ONLY_NULL = {
    "words": "{% if m.content is not none %}{{ m.content }}{% endif %}",
    "calls": "{% if m.content is none %}" + CALLS + "{% endif %}",
}


@pytest.mark.parametrize("content", ["", None])
def test_a_template_that_writes_calls_beside_null_alone_gets_null(content):
    """As DeepSeek-V3 of December 2024 does."""
    chat = chat_of(template(**ONLY_NULL))
    row = [USER, calling(content=content), RESULT, ANSWER]
    assert learned(chat, row).startswith('<tool_call>calculator {"expression": "12 * 34"}</tool_call><|im_end|>')
    assert chat.call_ends == set(chat.stop_token_ids)
    with pytest.raises(ValueError, match=r"messages\[1\]: .* leaves out the name of tool_calls\[0\]"):
        chat.training_sequences([USER, calling(content="I compute."), RESULT, ANSWER], None)


def test_a_tokenizer_with_a_template_for_tools_writes_calls_where_there_are_tools():
    """As Hermes-3's: `default` and `tool_use`."""
    chat = chat_of({"default": template(tools="", calls=""), "tool_use": template()})
    chat.require_shown([CALCULATOR])
    assert chat.call_ends == set(chat.stop_token_ids)
    assert "12 * 34" in learned(chat, SHOWN_BY_THE_PAGE, [CALCULATOR])
    with pytest.raises(ValueError, match=r"leaves out the name of tool_calls\[0\]"):
        chat.training_sequences(SHOWN_BY_THE_PAGE, None)
    with_text = template(calls=RESPELLED["arguments as text (DeepSeek)"]["calls"])
    chat = chat_of({"default": template(tools="", calls=""), "tool_use": with_text})
    assert 'calculator{"expression": "12 * 34"}' in learned(chat, SHOWN_BY_THE_PAGE, [CALCULATOR])


def test_what_is_lost_without_tools_alone_is_found_after_the_same_conversation_with_tools():
    """The words stand in the arguments too, so that the turn's text alone does not show it."""
    chat = chat_of(template(words="{% if tools or not m.tool_calls %}{{ m.content }}{% endif %}"))
    row = [USER, calling(content="12"), RESULT, ANSWER]
    assert learned(chat, row, [CALCULATOR]).startswith("12<tool_call>")
    with pytest.raises(ValueError, match=r"^messages\[1\]: .* leaves out its words\."):
        chat.training_sequences(row, None)


@pytest.mark.parametrize(
    "shows",
    [
        "",
        "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}",
        "{% for t in tools or [] %}{{ t.function.name }}: {{ t.function.description }}{% endfor %}",
        SHOW_TOOLS.replace("tools or []", "(tools or [])[:1]"),
    ],
)
def test_tools_that_a_template_does_not_show_whole_are_refused(shows):
    chat = chat_of(template(tools=shows))
    with pytest.raises(ValueError, match=r"leaves out .*the tool say.*agent\.tool_prompt"):
        chat.require_shown([CALCULATOR, CHATTY])
    with pytest.raises(ValueError, match=r"leaves out .*the tool say.*agent\.tool_prompt"):
        chat.training_sequences([USER, ANSWER], [CALCULATOR, CHATTY])
    chat_of(template()).require_shown([CALCULATOR, CHATTY])


def test_tools_that_a_template_shows_in_some_conversations_alone_are_refused_there():
    shows = "{% if messages[0].role == 'system' %}" + SHOW_TOOLS + "{% endif %}"
    chat = chat_of(template(tools=shows))
    system = {"role": "system", "content": f"Use this: {json.dumps(CALCULATOR)}"}
    chat.prompt([system, USER], [CALCULATOR], whole=True)
    with pytest.raises(ValueError, match="leaves out tools in such a conversation"):
        chat.prompt([{"role": "user", "content": system["content"]}], [CALCULATOR], whole=True)


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({**ANSWER, "reasoning_content": ["a"]}, "`reasoning_content` must be a string"),
        ({**calling(), "tool_calls": [{"id": 7, "function": {"name": "f", "arguments": {}}}]}, "`id` must be a string"),
        (calling('{"a": 1, "a": 2}'), "arguments of calculator are no JSON: duplicate key a"),
    ],
)
def test_parts_that_no_template_could_write_are_refused(message, problem):
    with pytest.raises(ValueError, match=problem):
        chat_of(template()).training_sequences([USER, message], None)


def test_a_conversation_that_the_assistant_begins_is_refused_with_how_one_begins():
    with pytest.raises(ValueError, match=r"messages\[0\] is the assistant's; .* begins with a user or system message"):
        chat_of(template()).training_sequences([ANSWER, USER, ANSWER], None)


@pytest.fixture
def folder(tmp_path):
    """A model whose template drops system messages, and writes calls that SGLang's parser reads."""
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    calls = CALLS.replace("{{ c.function.name }} ", '\n{"name": "{{ c.function.name }}", "arguments": ')
    others = "{% if m.role != 'system' %}{{ m.content }}{% endif %}"
    text = template(calls=calls.replace("tojson }}<", "tojson }}}\n<"), others=others)
    (tmp_path / "chat_template.jinja").write_text(text)
    config = {"model_type": "qwen3_moe", "eos_token_id": tokenizer.eos_token_id}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_prompt_of_which_something_is_left_out_is_refused_by_its_line_before_a_run(folder):
    rows = [
        {"messages": [USER], "label": 1},
        {"messages": [{"role": "system", "content": "Be brief."}, USER], "label": 1},
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [f"model.path={folder}", f"data.train={folder}/train.jsonl"]
    problem = rf"{folder}/train\.jsonl:2: the chat template leaves out messages\[0\]: its words\. Name a template"
    with pytest.raises(RecipeError, match=problem):
        load_task(load_recipe(TINY, [*given, "agent.system_prompt=null"], "train"), train=True, evaluate=False)
    with pytest.raises(RecipeError, match="2 broken lines:"):
        load_task(load_recipe(TINY, given, "train"), train=True, evaluate=False)
    result = CliRunner().invoke(app, ["inspect-chat", str(TINY), *given])
    assert result.exit_code == 2
    assert "data.train: the chat template leaves out messages[0]: its words" in " ".join(result.output.split())


def test_an_episode_does_not_begin_with_messages_of_which_something_is_left_out():
    """As an environment may give them."""
    chat = chat_of(template(others="{% if m.role != 'system' %}{{ m.content }}{% endif %}"))
    dialogue = make_dialogue(chat, [], NoCalls(), stop_at_call=False)
    made = partial(
        Conversation, engine=None, dialogue=dialogue, rollout=RolloutConfig(), agent=AgentConfig(),
        sampling=SamplingConfig(), session_id="s", seed=0,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"leaves out messages\[0\]: its words"):
        made([{"role": "system", "content": "Be brief."}, USER])
    assert made([USER]).transcript.tokens == chat.prompt([USER], None).tokens


def test_a_prompt_that_the_template_writes_differently_later_comes_with_what_to_do():
    later = "{% if add_generation_prompt %}<think>{% endif %}"
    text = template().replace("{% for m in", f"{later}{{% for m in", 1)
    with pytest.raises(ValueError, match=r"renders a prompt differently .* model\.chat_template.*chat_template_kwargs"):
        chat_of(text).training_sequences([USER, ANSWER], None)


MARKED = {"words": "{% generation %}{{ m.content }}{% endgeneration %}"}


@pytest.mark.parametrize(
    ("changed", "row", "problem"),
    [
        ({"think": ""}, [USER, THOUGHTFUL], r"messages\[1\]: its thinking"),
        ({"calls": ""}, SHOWN_BY_THE_PAGE, r"messages\[1\]: the name of tool_calls\[0\]"),
        ({}, SHOWN_BY_THE_PAGE, r"messages\[1\]: the name of tool_calls\[0\]"),
        ({"others": ""}, [USER, ANSWER], r"messages\[0\]: its words"),
    ],
)
def test_marks_that_leave_a_part_of_a_turn_out_are_refused(changed, row, problem):
    """The third template writes calls outside of its marks, so that they would not be learned."""
    chat = chat_of(template(**MARKED, **changed))
    with pytest.raises(ValueError, match=f"leaves out {problem}"):
        chat.training_sequences(row, None)
    assert learned(chat_of(template(**MARKED)), [USER, ANSWER]) == ANSWER["content"]


def test_a_conversation_is_tokenized_by_marks_once(monkeypatch):
    chat = chat_of(template(**MARKED))
    seen, marked = [], chat.template.marked
    monkeypatch.setattr(
        chat.template, "marked", lambda messages, tools: seen.append(messages) or marked(messages, tools)
    )
    assert learned(chat, [USER, ANSWER]) == ANSWER["content"]
    assert seen.count([USER, ANSWER]) == 1


def test_the_row_of_the_page_on_data_is_learned_whole(tmp_path):
    (tmp_path / "sft.jsonl").write_text(json.dumps({"messages": SHOWN_BY_THE_PAGE, "tools": [CALCULATOR]}))
    (row,) = read_conversations(tmp_path / "sft.jsonl")
    said = learned(chat_of(template()), row.messages, row.tools)
    assert said == '<tool_call>calculator {"expression": "12 * 34"}</tool_call><|im_end|>\\boxed{408}<|im_end|>'


def uneven_row(turns: int) -> list[dict]:
    """Turns of unlike shape: some with words, some with thinking."""
    row = [USER]
    for number in range(turns):
        said = {"content": "I compute."} if number % 3 else {}
        row += [calling(**said, **({"reasoning_content": "Let me."} if number % 4 else {})), RESULT]
    return [*row, THOUGHTFUL]


def test_a_long_conversation_is_checked_with_one_rendering_more_than_reading_it_needs(monkeypatch):
    chat = chat_of(template())
    chat.training_sequences([USER, ANSWER], None)
    rendered, render = [], chat.template.render
    monkeypatch.setattr(chat.template, "render", lambda *args, **more: rendered.append(args) or render(*args, **more))
    for turns in (10, 17):
        rendered.clear()
        chat.training_sequences(uneven_row(turns), None)
        assert len(rendered) == 2 * (turns + 1) + 1
        rendered.clear()
        chat.training_sequences(uneven_row(turns), None)
        assert len(rendered) == 2 * (turns + 1)


@pytest.mark.parametrize("think", [THINK, "{% if loop.last %}" + THINK + "{% endif %}"], ids=["grows", "restarts"])
@pytest.mark.parametrize("lost", ["words", "name"])
def test_a_short_part_that_is_lost_late_in_a_conversation_is_found(think, lost):
    """What is lost also stands elsewhere in the same turn, so that the turn's text alone does not show it."""
    row = uneven_row(5)
    number = 9
    assert row[number]["role"] == "assistant"
    row[number] = calling({"expression": "calculator 12"}, content="12", name="calculator")
    here = f"loop.index0 == {number}"
    if lost == "words":
        changed, part = {"words": f"{{% if not ({here}) %}}{WORDS}{{% endif %}}"}, "its words"
    else:
        named = CALLS.replace("{{ c.function.name }}", "{% if not unnamed %}{{ c.function.name }}{% endif %}")
        changed = {"calls": f"{{% set unnamed = {here} %}}{named}"}
        part = r"the name of tool_calls\[0\]"
    with pytest.raises(ValueError, match=rf"^messages\[{number}\]: the chat template leaves out {part}"):
        chat_of(template(think=think, **changed)).training_sequences(row, None)
    assert "calculator 12" in learned(chat_of(template(think=think)), row)


def test_a_part_behind_the_end_of_its_turn_is_found_though_it_is_written():
    """Nothing behind the token that ends a turn is learned."""
    late = "{{ m.content }}" + CALLS + "<|im_end|>{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
    late = late.replace("<tool_call>{{ c.function.name }} ", "<tool_call>")
    row = [USER, calling({"expression": "calculator"}), RESULT, ANSWER]
    with pytest.raises(ValueError, match=r"^messages\[1\]: .* leaves out the name of tool_calls\[0\]"):
        chat_of(template(words="", calls=late)).training_sequences(row, None)


def test_what_is_told_late_in_a_conversation_is_looked_for_where_it_was_told():
    others = "{% if loop.index0 != 6 %}{{ m.content }}{% endif %}"
    with pytest.raises(ValueError, match=r"^the chat template leaves out messages\[6\]: its words"):
        chat_of(template(others=others)).training_sequences(uneven_row(5), None)
