"""Whether the templates of tests/templates write what the published ones do.

The folder that SLIMRL_PUBLISHED_TEMPLATES names holds published templates, as KEY.jinja for the keys of
chat_templates.MODELS and KEY.tools.jinja for the one that a tokenizer takes where there are tools. Ours have prose of
their own, so what introduces the tools and who the model is are exchanged first; all else is compared byte for byte.
"""

import json
import re
from random import Random
from typing import Any

from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import _compile_jinja_template

from slimrl.agent.chat.template import Messages, Schemas

_TOLD = "These are your functions:\n<tools>"
_CALL = "<tool_call>\n{"
_QWEN_TOOLS = (
    (r"# Tools\n\nYou may call.*?XML tags:\n<tools>", _TOLD),
    (r"</tools>\n\nFor each function call.*?</tool_call>(<\|im_end\|>\n)",
     r'</tools>\nTo call one, write\n<tool_call>\n{"name": NAME, "arguments": OBJECT}\n</tool_call>\1'),
)  # fmt: skip
_GLM_TOOLS = (
    (r"# Tools\n\nYou may call.*?XML tags:\n<tools>", _TOLD),
    (r"</tools>\n\nFor each function call.*?\.\.\.\n</tool_call>",
     r"</tools>\nTo call one, write\n"
     r"<tool_call>NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>"),
    (r"</tools>\n\nFor each function call.*?\.\.\.</tool_call>",
     r"</tools>\nTo call one, write\n<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>"),
)  # fmt: skip
_LLAMA_TOOLS = (
    (r"(Given the following functions|You have access to the following functions).*?Do not use variables\.\n\n",
     r'To call a function, write {"name": NAME, "parameters": OBJECT}. These are your functions:\n\n'),
)  # fmt: skip
_HERMES_TOOLS = (
    (r"You are a function calling AI model\..*?available tools: <tools> ", "These are your functions: <tools> "),
    (r" </tools>Use the following pydantic.*?</tool_call><\|im_end\|>\n",
     r' </tools>To call one, write\n<tool_call>\n{"name": NAME, "arguments": OBJECT}\n</tool_call><|im_end|>\n'),
)  # fmt: skip
_CODER_TOOLS = (
    (r"# Tools\n\nYou have access to the following (?:tools|functions):\n\n<tools>", _TOLD),
    (r"</tools>\n\nIf you choose.*?</IMPORTANT>",
     r"</tools>\nTo call one, write\n<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n"
     r"</tool_call>"),
)  # fmt: skip
_MINIMAX_TOOLS = (
    (r"# Tools\nYou may call one or more tools.*?JSONSchema format:\n\n<tools>", _TOLD),
    (r"</tools>\n\nWhen making tool calls.*?</minimax:tool_call>",
     r'</tools>\nTo call one, write\n<minimax:tool_call>\n<invoke name="NAME">\n'
     r'<parameter name="KEY">VALUE</parameter>\n</invoke>\n</minimax:tool_call>'),
)  # fmt: skip
_HY_TOOLS = (
    (r"</tools>\n\nFor function call returns, you should first print <tool_calls(:?\w*)>.*?print </tool_calls\1>",
     r"</tools>\nTo call some, write\n<tool_calls\1>\n<tool_call\1>NAME<tool_sep\1>\n<arg_key\1>KEY</arg_key\1>\n"
     r"<arg_value\1>VALUE</arg_value\1>\n</tool_call\1>\n</tool_calls\1>"),
)  # fmt: skip
_WHO = (
    r"You are Qwen, created by Alibaba Cloud\. You are a helpful assistant\."
    r"|You are Qwen, a helpful AI assistant that can interact with a computer to solve tasks\."
    r"|You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    r"|You are Kimi, an AI assistant created by Moonshot AI\."
    r"|You are ChatGPT, a large language model trained by OpenAI\."
    r"|You are a helpful assistant\.?"
)
PROSE = ((_WHO, "You help."), *_MINIMAX_TOOLS, *_CODER_TOOLS, *_QWEN_TOOLS, *_GLM_TOOLS, *_HY_TOOLS, *_LLAMA_TOOLS,
         *_HERMES_TOOLS)  # fmt: skip
"""(what published templates say, what ours say)"""

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": " Add <b>two</b> numbers. ",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "One. "},
                    "b": {"type": ["integer", "string"], "description": "Ünother", "enum": [1, 2]},
                    "f": {"type": "array", "items": {"type": "string"}, "description": "f"},
                    "c": {"type": "object", "description": "c", "additionalProperties": {"type": "number"}},
                    "d": {"type": "object", "description": "d"},
                    "e": {"description": "e", "default": None},
                },
                "required": ["a"],
            },
            "strict": True,
        },
    },
    {
        "type": "function",
        "function": {"name": "now", "description": "Time", "parameters": {"type": "object", "properties": {}},
                     "return": {"type": "string", "description": "When"}},
    },
    {
        "type": "function",
        "function": {
            "name": "none", "description": "Nothing",
            "parameters": {
                "type": "object",
                "properties": {
                    "of": {"type": "null", "description": "it"},
                    "in": {
                        "type": "object",
                        "properties": {
                            "p": {"type": "string", "enum": ["x", "y"]},
                            "q": {"type": "array", "items": {"type": "object", "properties": {"r": {"type": "null"}}}},
                            "s": {"type": "array", "items": {"type": "array", "items": {"type": "boolean"}}},
                        },
                        "required": ["p"],
                    },
                    "or": {"oneOf": [{"type": "string", "description": "s"}, {"type": "integer", "default": 3}]},
                    "so": {"type": "string", "nullable": True, "default": "x"},
                    "is": {"type": "string", "enum": ["x", "y"], "default": "x"},
                    "all": {"type": "array"},
                },
            },
        },
    },
]  # fmt: skip

_WORDS = ("", "Hi", " two words \n", "\nlines\n\n", "x</think>y", "<think>\nt\n</think>\n\nsaid",
          "a</think>b</think>\nc", "<tool_response>\nr\n</tool_response>", "ends /nothink", "{'a': 1}",
          "Größe 三 \U0001f600 <b>&'\"", "None")  # fmt: skip


def exchanged(text: str) -> str:
    """A published rendering with our prose."""
    for published, ours in PROSE:
        text = re.sub(published, ours, text, flags=re.DOTALL)
    return text


def rendered(
    template: str, messages: Messages, tools: Schemas, *, generate: bool, variables: dict[str, Any]
) -> str | None:
    """By the Jinja of transformers; None if the template refuses the messages."""
    try:
        return _compile_jinja_template(template).render(
            messages=json.loads(json.dumps(messages)), tools=tools, documents=None, add_generation_prompt=generate,
            bos_token="[BOS]", eos_token="[EOS]", **variables,
        )  # fmt: skip
    except (TemplateError, TypeError, AttributeError, LookupError, RecursionError):
        return None


class Conversations:
    """Random ones, with what data and agents leave out or write otherwise."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.calls = 0
        self.as_text = False
        """Whether the calls' arguments are JSON text"""

    def one(self) -> tuple[list[dict[str, Any]], Schemas, bool, dict[str, Any]]:
        """(messages, tools, with the header of the next turn, variables)"""
        self.calls = 0
        odd = self.random.random() < 0.6
        self.as_text = self.random.random() < 0.5
        messages = [{"role": "system", "content": self._words(odd)}] * (self.random.random() < 0.4)
        for _ in range(self.random.randrange(1, 4)):
            messages.append({"role": "user", "content": self._words(odd)})
            for _ in range(self.random.randrange(4)):
                messages += self._turn(odd)
        if odd and self.random.random() < 0.2:
            messages.insert(self.random.randrange(len(messages)), {"role": "system", "content": self._words(odd)})
        if odd and self.random.random() < 0.15:
            del messages[self.random.randrange(len(messages)) :]
        if odd and self.random.random() < 0.1:
            messages = messages[1:]
        return (
            messages,
            self.random.choice((None, TOOLS[:1], TOOLS[:2], TOOLS)),
            self.random.random() < 0.5,
            self._variables(),
        )

    def _variables(self) -> dict[str, Any]:
        choices: dict[str, tuple[Any, ...]] = {
            "enable_thinking": (True, False), "thinking": (True, False), "clear_thinking": (True, False),
            "preserve_thinking": (True, False), "preserved_thinking": (True, False),
            "interleaved_thinking": (True, False), "is_training": (True, False),
            "reasoning_effort": ("high", "low", "no_think", "max"),
            "date_string": ("1 May 2025",), "tools_in_user_message": (True, False),
        }  # fmt: skip
        return {name: self.random.choice(values) for name, values in choices.items() if self.random.random() < 0.3}

    def _words(self, odd: bool) -> Any:
        if odd and self.random.random() < 0.06:
            return self.random.choice((None, [{"type": "text", "text": "part"}, {"type": "text", "text": " two"}]))
        return self.random.choice(_WORDS[: None if odd else 4])

    def _turn(self, odd: bool) -> list[dict[str, Any]]:
        turn: dict[str, Any] = {"role": "assistant", "content": self._words(odd)}
        if self.random.random() < 0.3:
            key = self.random.choice((*["reasoning_content"] * 4, "thinking", "reasoning"))
            turn[key] = self.random.choice(("", "\nthought\n", "why", *([None] if odd else [])))
        kind = self.random.random()
        if odd and kind < 0.15:
            turn["tool_calls"] = self.random.choice(([], None))
        if odd and self.random.random() < 0.05:
            del turn["content"]
        if odd and self.random.random() < 0.05:
            turn["name"] = "who"
        if kind < 0.4:
            return [turn]
        if self.random.random() < 0.5:
            turn["content"] = self.random.choice(("", None, *(["said"] if odd else [])))
        count = 1 + (self.random.random() < 0.3)
        turn["tool_calls"] = [self._call(odd) for _ in range(count)]
        return [turn, *(self._result(call, odd) for call in turn["tool_calls"])]

    def _call(self, odd: bool) -> dict[str, Any]:
        arguments: Any = self.random.choice(
            ({}, {"a": 1}, {"a": -2, "b": None, "note": "ü<&\n"}, {"a": [1, "x"], "c": {"k": 1.5}, "e": True})
        )
        if self.as_text != (odd and self.random.random() < 0.05):
            arguments = json.dumps(arguments, ensure_ascii=False)
        call = {"id": f"functions.add:{self.calls}", "type": "function",
                "function": {"name": "add", "arguments": arguments}}  # fmt: skip
        self.calls += 1
        for name in ("id", "type") if odd else ():
            if self.random.random() < 0.1:
                del call[name]
        if odd and self.random.random() < 0.05:
            return {"id": "bare", "name": "add", "arguments": arguments}
        if odd and self.random.random() < 0.05:
            call["function"].pop("arguments")
        return call

    def _result(self, call: dict[str, Any], odd: bool) -> dict[str, Any]:
        result: dict[str, Any] = {"role": "tool", "content": self._words(odd), "name": "add"}
        if "id" in call:
            result["tool_call_id"] = call["id"]
        for name in ("name", "tool_call_id") if odd else ():
            if self.random.random() < 0.1:
                result.pop(name, None)
        return result
