"""The templates of tests/templates: what of the published ones must not be lost in them, and that they write the same.

The literal texts here were written by the published templates, but for our words in place of their prose.
"""

import json
import os
from pathlib import Path

import pytest
from chat_templates import FOLDER, MODELS, template_text
from published_templates import TOOLS, Conversations, exchanged, rendered

from slimrl.agent.chat.tool_prompts import PUBLISHED as PUBLISHED_PROMPTS
from slimrl.agent.chat.tool_prompts import with_tools

PUBLISHED = os.environ.get("SLIMRL_PUBLISHED_TEMPLATES", "")
FILES = sorted(
    {model.file for model in MODELS.values() if "/" not in model.file}
    | {path.name for path in FOLDER.glob("*_tool_use.jinja")}
)
CONVERSATIONS = 1000

USER = {"role": "user", "content": "q"}
TEXT_CALL = {"type": "function", "id": "functions.f:0", "function": {"name": "f", "arguments": '{"x": 1}'}}
CALL = {"type": "function", "id": "functions.f:0", "function": {"name": "f", "arguments": {"x": True}}}
BARE = {"function": {"name": "f", "arguments": '{"x": 1}'}}
"""Without an id and a type"""
RESULT = {"role": "tool", "name": "f", "tool_call_id": "functions.f:0", "content": "r"}


def said(content="", **parts) -> dict:
    return {"role": "assistant", "content": content, **parts}


def written(key: str, *messages: dict, tools=None, generate: bool = False) -> str | None:
    model = MODELS[key]
    template = (tools and model.tool_template) or model.template
    return rendered(template, messages, tools, generate=generate, variables=model.kwargs)


@pytest.mark.skipif(not PUBLISHED, reason="SLIMRL_PUBLISHED_TEMPLATES names no folder of published templates")
@pytest.mark.parametrize("name", FILES)
def test_a_template_writes_what_the_published_one_does(name):
    path = Path(PUBLISHED) / name
    if not path.is_file():
        pytest.skip(f"no {name} in {PUBLISHED}")
    published, conversations, refused = path.read_text(), Conversations(seed=1), 0
    for _ in range(CONVERSATIONS):
        messages, tools, generate, variables = conversations.one()
        theirs = rendered(published, messages, tools, generate=generate, variables=variables)
        ours = rendered(template_text(name), messages, tools, generate=generate, variables=variables)
        assert ours == (None if theirs is None else exchanged(theirs)), (messages, tools, generate, variables)
        refused += theirs is None
    print(f"{name}: {CONVERSATIONS} conversations are the same, {refused} of them refused")
    assert refused < CONVERSATIONS * 0.7


@pytest.mark.parametrize("thinks", [False, True])
def test_the_template_of_deepseek_v32_writes_what_its_own_code_encodes(thinks):
    """It is published as code in place of a template; SGLang's server has a copy, and gives it an empty system message
    for the tools where there is none."""
    from sglang.srt.entrypoints.openai import encoding_dsv32

    template, conversations, refused = MODELS["deepseek_v32"].template, Conversations(seed=1), 0
    template = template.replace("bos_token", "'<｜begin▁of▁sentence｜>'")
    template = template.replace("eos_token", "'<｜end▁of▁sentence｜>'")
    for _ in range(CONVERSATIONS):
        messages, tools, *_ = conversations.one()
        for message in messages:
            message["content"] = message.get("content") if isinstance(message.get("content"), str) else ""
        given = json.loads(json.dumps(messages))
        if not given or given[0]["role"] != "system":
            given.insert(0, {"role": "system", "content": ""})
        given[0]["tools"] = tools
        try:
            theirs = encoding_dsv32.encode_messages(given, thinking_mode="thinking" if thinks else "chat")
        except (encoding_dsv32.DS32EncodingError, ValueError, LookupError):
            theirs = None
        for call in (call for message in messages for call in message.get("tool_calls") or ()):
            if isinstance(arguments := call.get("function", {}).get("arguments"), str):
                call["function"]["arguments"] = json.loads(arguments)
        shown = with_tools(messages, PUBLISHED_PROMPTS["deepseek_v32"](tools)) if tools else messages
        ours = rendered(template, shown, None, generate=True, variables={"thinking": thinks})
        assert ours == theirs, (messages, tools)
        refused += theirs is None
    assert refused < CONVERSATIONS * 0.7


def test_which_templates_show_the_tools():
    silent = {key for key in MODELS if "add" not in (written(key, USER, tools=TOOLS[:2], generate=True) or "")}
    assert silent == {
        "deepseek_v3_2412", "deepseek_v3", "deepseek_r1", "r1_distill", "deepseek_v31", "deepseek_v31_think",
        "moonlight", "llama3", "smollm2", "olmoe", "deepseek_v32", "deepseek_v32_think",
    }  # fmt: skip


V3_CALL = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"x": 1}\n```<｜tool▁call▁end｜>'
V3_END = "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
V3_TURN = f"<｜Assistant｜><｜tool▁calls▁begin｜>{V3_CALL}"
V3_RESULT = "<｜tool▁output▁begin｜>r<｜tool▁output▁end｜>"
KIMI_START = "<|im_system|>system<|im_middle|>You help.<|im_end|><|im_user|>user<|im_middle|>q<|im_end|>"
KIMI_TURN = f"{KIMI_START}<|im_assistant|>assistant<|im_middle|>"
LLAMA_TURN = "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"

ODDITIES = {
    "calls are written once content is null, and dropped where it is empty": (
        "deepseek_v3_2412", (USER, said("", tool_calls=[TEXT_CALL])),
        "[BOS]<｜User｜>q<｜Assistant｜><｜end▁of▁sentence｜>"),
    "one call has no end": (
        "deepseek_v3_2412", (USER, said(None, tool_calls=[TEXT_CALL]), RESULT),
        f"[BOS]<｜User｜>q{V3_TURN}<｜tool▁outputs▁begin｜>{V3_RESULT}<｜tool▁outputs▁end｜>"),
    "each call from the second on ends them all": (
        "r1_distill", (USER, said(None, tool_calls=[TEXT_CALL] * 3)),
        f"[BOS]<｜User｜>q{V3_TURN}\n{V3_CALL}{V3_END}\n{V3_CALL}{V3_END}"),
    "the last system message replaces the ones before": (
        "r1_distill", ({"role": "system", "content": "a"}, USER, {"role": "system", "content": "b"}),
        "[BOS]b<｜User｜>q"),
    "what opens calls and results is written once in a conversation": (
        "deepseek_v3", (USER, *[said("", tool_calls=[TEXT_CALL]), RESULT] * 2),
        f"[BOS]<｜User｜>q{V3_TURN}{V3_END}<｜tool▁outputs▁begin｜>{V3_RESULT}\n{V3_CALL}{V3_END}{V3_RESULT}"
        "<｜tool▁outputs▁end｜>"),
    "words before a later call are dropped": (
        "deepseek_v3", (USER, said("", tool_calls=[TEXT_CALL]), RESULT, said("so", tool_calls=[TEXT_CALL])),
        f"[BOS]<｜User｜>q{V3_TURN}{V3_END}<｜tool▁outputs▁begin｜>{V3_RESULT}\n{V3_CALL}{V3_END}"),
    "an empty list of calls drops the answer": (
        "deepseek_r1", (USER, said("a", tool_calls=[])), f"[BOS]<｜User｜>q{V3_END}"),
    "V3.1 drops it too": (
        "deepseek_v31", (USER, said("a", tool_calls=[])), f"[BOS]<｜User｜>q<｜Assistant｜></think>{V3_END}"),
    "calls that are null are none": (
        "deepseek_v31", (USER, said("a", tool_calls=None)),
        "[BOS]<｜User｜>q<｜Assistant｜></think>a<｜end▁of▁sentence｜>"),
    "R1 refuses calls that are null": ("deepseek_r1", (USER, said("a", tool_calls=None)), None),
    "finished turns are written as if nothing had been thought": (
        "deepseek_v31_think", (USER, said("a", reasoning_content="t")),
        "[BOS]<｜User｜>q<｜Assistant｜></think>a<｜end▁of▁sentence｜>"),
    "a tool has no marker, and null is written": (
        "moonlight", (USER, said(None, tool_calls=[CALL]), RESULT),
        f"{KIMI_TURN}None<|im_end|>tool<|im_middle|>r<|im_end|>"),
    "calls are numbered anew in each turn": (
        "kimi_k2_0711", (USER, said(tool_calls=[{**CALL, "id": "functions.f:7"}])),
        f"{KIMI_TURN}<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        '{"x": true}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'),
    "a call without an id has no name": (
        "kimi_k2", (USER, said(tool_calls=[BARE]), {"role": "tool", "content": "r"}),
        f"{KIMI_TURN}<|tool_calls_section_begin|><|tool_call_begin|><|tool_call_argument_begin|>"
        '{"x": 1}<|tool_call_end|><|tool_calls_section_end|><|im_end|><|im_system|>tool<|im_middle|>## Return of \n'
        "    r<|im_end|>"),
    "thinking is dropped once there is an answer": (
        "kimi_k2_thinking", (USER, said("a", reasoning_content="t")), f"{KIMI_TURN}<think></think>a<|im_end|>"),
    "thinking that is null is written": (
        "kimi_k2_thinking", (USER, said("a", reasoning_content=None, tool_calls=[BARE])),
        f"{KIMI_TURN}<think>None</think>a<|tool_calls_section_begin|><|tool_call_begin|><|tool_call_argument_begin|>"
        '{"x": 1}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'),
    "words before a call are dropped": (
        "llama31", (USER, said("so", tool_calls=[CALL])),
        "[BOS]<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\nToday Date: 26 Jul "
        f'2024\n\n<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nq{LLAMA_TURN}{{"name": "f", "parameters": '
        '{"x": true}}<|eot_id|>'),
    "an empty list of calls is refused": ("llama31", (USER, said("a", tool_calls=[])), None),
    "calls are dropped": (
        "llama3", (USER, said("so", tool_calls=[CALL])),
        f"[BOS]<|start_header_id|>user<|end_header_id|>\n\nq{LLAMA_TURN}so<|eot_id|>"),
    "turns end with a line of their own behind the stop token": (
        "olmoe", (USER, said("a", tool_calls=[CALL]), USER),
        "[BOS]<|user|>\nq\n<|assistant|>\na[EOS]\n<|user|>\nq\n"),
    "arguments that are text become a text of JSON": (
        "qwen25", (USER, said(tool_calls=[TEXT_CALL])),
        "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<tool_call>\n"
        '{"name": "f", "arguments": "{\\"x\\": 1}"}\n</tool_call><|im_end|>\n'),
    "a thought is dropped once anything follows": (
        "qwq", (USER, said("<think>\nt\n</think>\n\na"), USER),
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n<|im_start|>user\nq<|im_end|>\n"),
    "an empty thought is written behind the last question": (
        "qwen3", (USER, said("a", reasoning_content="")),
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\na<|im_end|>\n"),
    "content that is null is refused": ("qwen3", (USER, said(None)), None),
    "content that is null is empty": (
        "qwen3_instruct", (USER, said(None)), "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"),
    "a truth is spelt as Python does": (
        "qwen3_coder", (USER, said(tool_calls=[CALL])),
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<tool_call>\n<function=f>\n<parameter=x>\nTrue\n"
        "</parameter>\n</function>\n</tool_call><|im_end|>\n"),
    "Qwen3.5 still does, behind a thought that was never thought": (
        "qwen35", (USER, said(tool_calls=[CALL])),
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n<tool_call>\n<function=f>\n"
        "<parameter=x>\nTrue\n</parameter>\n</function>\n</tool_call><|im_end|>\n"),
    "Qwen3.6 spells it as JSON does": (
        "qwen36", (USER, said("so", tool_calls=[CALL])),
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nso\n\n<tool_call>\n"
        "<function=f>\n<parameter=x>\ntrue\n</parameter>\n</function>\n</tool_call><|im_end|>\n"),
    "Qwen3.5 refuses a later system message": ("qwen35", (USER, {"role": "system", "content": "s"}), None),
    "a null answer is the word None": (
        "glm45", (USER, said(None)), "[gMASK]<sop><|user|>\nq<|assistant|>\n<think></think>\nNone"),
    "GLM-4.5 refuses arguments that are text": ("glm45", (USER, said(tool_calls=[TEXT_CALL])), None),
    "GLM-4.7 too": ("glm47", (USER, said(tool_calls=[TEXT_CALL])), None),
    "a result without a call is refused": ("minimax_m2", (USER, said("a"), RESULT), None),
    "a later system message is dropped": (
        "minimax_m2", (USER, {"role": "system", "content": "b"}), "]~!b[]~b]system\nYou help.[e~[\n]~b]user\nq[e~[\n"),
    "calls of a turn have markers of their own within common ones": (
        "minimax_m2", (USER, said(None, tool_calls=[CALL] * 2), RESULT, RESULT),
        "]~!b[]~b]system\nYou help.[e~[\n]~b]user\nq[e~[\n]~b]ai\nNone<minimax:tool_call>\n"
        + '<invoke name="f">\n<parameter name="x">true</parameter>\n</invoke>\n' * 2
        + "</minimax:tool_call>[e~[\n]~b]tool\n<response>r</response>\n<response>r</response>[e~[\n"),
}  # fmt: skip


@pytest.mark.parametrize("what", ODDITIES)
def test_an_oddity_of_a_published_template(what):
    key, messages, text = ODDITIES[what]
    assert written(key, *messages) == text


def test_hermes_drops_words_before_a_call_and_writes_no_calls_without_tools():
    turn = said("so", tool_calls=[CALL])
    call = '<|im_start|>assistant\n<tool_call>\n{"name": "f", "arguments": {"x": true}}\n</tool_call><|im_end|>\n'
    assert written("hermes3", USER, turn, tools=TOOLS[:2]).endswith(f"<|im_start|>user\nq<|im_end|>\n{call}")
    assert written("hermes3", USER, turn).endswith("<|im_start|>assistant\nso<|im_end|>\n")


def test_hermes_cannot_show_a_tool_with_a_type_that_python_lacks():
    """It takes the name of the type for a list of types, and goes on with its letters for ever."""
    assert written("hermes3", USER, tools=TOOLS) is None
    with pytest.raises(ValueError, match="the chat template refuses it: maximum recursion depth exceeded"):
        MODELS["hermes3"].chat().prompt([USER], TOOLS)
