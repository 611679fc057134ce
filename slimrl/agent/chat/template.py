"""The tokenizer's chat template: messages to text, text to tokens, and back."""

import json
from collections.abc import Sequence
from difflib import get_close_matches
from functools import cached_property
from inspect import signature
from itertools import product
from typing import TYPE_CHECKING, Any

from jinja2.exceptions import TemplateError, TemplateSyntaxError

from slimrl.agent.chat.reserved import reserved_tokens
from slimrl.agent.chat.tool_prompts import ToolPrompt, with_tools
from slimrl.base.strict_json import strict_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[dict[str, Any]]
Schemas = Sequence[dict[str, Any]] | None
Marked = tuple[list[int], list[bool]]
"""Token ids, and whether each is the assistant's"""

PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "probed_tool",
        "description": "Described by probes alone.",
        "parameters": {
            "type": "object",
            "properties": {"probed_parameter": {"type": "string", "description": "Taken by probes alone."}},
            "required": ["probed_parameter"],
        },
    },
}
"""Tool in conversations that find out what a template does with tools: some have another template for these."""

NO_ARGUMENTS = "{}"

_KEY, _VALUE = "probe_key", "probe_value"


class ChatTemplate:
    """A tokenizer with its chat template.

    Args:
        tokenizer: a fast tokenizer.
        text: the template in Jinja; None for the tokenizer's own.
        kwargs: further variables of the template, such as `enable_thinking`.
        tool_prompt: what the system message says of the tools, instead of the template; None leaves it to the template.

    Raises:
        ValueError: there is no template.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        text: str | None = None,
        kwargs: dict[str, Any] | None = None,
        tool_prompt: ToolPrompt | None = None,
    ) -> None:
        if text is None and not tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template; name a file of one in model.chat_template")
        self._tokenizer = tokenizer
        self._text = text
        self._kwargs = dict(kwargs or {})
        self._tool_prompt = tool_prompt
        self.reserved = reserved_tokens(tokenizer)
        """Id of each reserved token, by its text"""
        self._longest_first = sorted(self.reserved, key=len)[::-1]

    def require_words(self) -> None:
        """Try the template on one question.

        Raises:
            ValueError: it is no template, refuses any conversation, or leaves words out.
        """
        question = {"role": "user", "content": "some words"}
        if question["content"] not in self.render([question], None, generate=True):
            raise ValueError("the chat template does not write what the user says")

    def require_read(self) -> None:
        """Raises ValueError if the template does not read a further variable; `require_words` finds broken ones."""
        from transformers import PreTrainedTokenizerBase
        from transformers.utils.chat_template_utils import _get_template_variables

        ours = {"messages", *signature(PreTrainedTokenizerBase.apply_chat_template).parameters} - {"documents"}
        try:
            read = {name for source in self._sources for name in _get_template_variables(source)}
        except TemplateSyntaxError:
            return
        for name in self._kwargs:
            if name in ours:
                raise ValueError(f"{name}: slimrl sets it")
            if name not in read:
                close = get_close_matches(name, read, n=1)
                hint = f" Did you mean {close[0]}?" if close else ""
                raise ValueError(f"{name}: the chat template does not read it.{hint}")

    def render(self, messages: Messages, schemas: Schemas, *, generate: bool) -> str:
        """Text of a conversation.

        Args:
            schemas: JSON schemas of the tools that the model is shown.
            generate: with the header of the assistant's next turn.

        Raises:
            ValueError: the template refuses these messages.
        """
        return self._apply(self._as_taken(messages), schemas, add_generation_prompt=generate, tokenize=False)

    def marked(self, messages: Messages, schemas: Schemas) -> Marked | None:
        """(tokens, mask) of a conversation by the template's `{% generation %}` marks; None if it has none.

        The mask is true on what the template marks as the assistant's.
        """
        if not self._has_marks(schemas):
            return None
        encoding = self._apply(
            self._as_taken(messages), schemas, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return list(encoding["input_ids"]), [bool(bit) for bit in encoding["assistant_masks"]]

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; nothing is added to them, since the template writes the first token itself."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens, special tokens included."""
        text = self._tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def escape(self, text: str) -> str:
        """Insert a space into each reserved token in the text: a tool's result must not end or open a turn."""
        for reserved in self._longest_first:
            text = text.replace(reserved, f"{reserved[0]} {reserved[1:]}")
        return text

    @property
    def _sources(self) -> list[str]:
        """The template, or all that the tokenizer has by names such as `default` and `tool_use`."""
        own = self._tokenizer.chat_template if self._text is None else self._text
        return list(own.values()) if isinstance(own, dict) else [own]

    def _has_marks(self, schemas: Schemas) -> bool:
        shown = list(schemas) if schemas and self._tool_prompt is None else None
        source = self._tokenizer.get_chat_template(self._text, shown)
        return "{% generation" in source or "{%- generation" in source

    @cached_property
    def _takes_calls(self) -> tuple[bool, str | None]:
        """Whether the template wants a call's arguments as JSON text, not as an object, and which content next to calls
        is none: "", as SGLang's server makes it, or null where a template writes calls with that alone."""
        question = {"role": "user", "content": "q"}
        for silence, as_text in product(("", None), (False, True)):
            arguments = {_KEY: _VALUE}
            call = _call(json.dumps(arguments) if as_text else arguments, silence)
            try:
                text = self._apply([question, call], [PROBE_TOOL], tokenize=False)
            except ValueError:
                continue
            # A template that joins texts writes an object as Python does, in single quotes.
            if _VALUE in text and f"'{_KEY}'" not in text:
                return as_text, silence
        return False, ""

    @cached_property
    def _takes_thinking_as(self) -> str:
        """The key of a message's thinking that the template reads: gpt-oss's is `thinking`."""
        question, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
        for key in ("reasoning_content", "thinking"):
            try:
                if _VALUE in self._apply([question, {**answer, key: _VALUE}], None, tokenize=False):
                    return key
            except ValueError:
                continue
        return "reasoning_content"

    @cached_property
    def _takes_words_beside_thinking(self) -> bool:
        """Whether a turn with a call may have words and thinking: gpt-oss's template has one place for both."""
        arguments = json.dumps({_KEY: _VALUE}) if self._takes_calls[0] else {_KEY: _VALUE}
        turn = {**_call(arguments, "words"), self._takes_thinking_as: "thinking"}
        try:
            self._apply([{"role": "user", "content": "q"}, turn], [PROBE_TOOL], tokenize=False)
        except ValueError:
            return False
        return True

    def _as_taken(self, messages: Messages) -> list[dict[str, Any]]:
        """The messages with each call's arguments as the template wants them, whichever way they are given, and with
        thinking under the key that it reads.

        No content is an empty one, as SGLang's server makes it: templates that join texts would write None. Other keys
        that are null, and lists without calls, are as if they were not there: templates ask for some of them by name.
        """
        taken = []
        for message in messages:
            changed = {key: value for key, value in message.items() if value is not None and key != "tool_calls"}
            changed.setdefault("content", "")
            if "reasoning_content" in changed:
                changed.setdefault(self._takes_thinking_as, changed["reasoning_content"])
            if calls := message.get("tool_calls"):
                changed["tool_calls"] = [self._with_own_arguments(call) for call in calls]
                changed["content"] = changed["content"] or self._takes_calls[1]
                key = self._takes_thinking_as
                if changed["content"] and changed.get(key) and not self._takes_words_beside_thinking:
                    changed[key], changed["content"] = f"{changed[key]}\n{changed['content']}", ""
            taken.append(changed)
        return taken

    def _with_own_arguments(self, call: dict[str, Any]) -> dict[str, Any]:
        arguments = call["function"]["arguments"]
        if self._takes_calls[0]:
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            arguments = arguments or NO_ARGUMENTS
        elif isinstance(arguments, str):
            arguments = read_arguments(call)
        return {"type": "function", **call, "function": {**call["function"], "arguments": arguments}}

    def _apply(self, messages: Messages, schemas: Schemas, **options: Any) -> Any:
        if schemas and self._tool_prompt is not None:
            messages, schemas = with_tools(messages, self._tool_prompt(schemas)), None
        try:
            return self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(schemas) if schemas else None,
                chat_template=self._text,
                **self._kwargs,
                **options,
            )
        except TemplateSyntaxError as error:
            raise ValueError(f"line {error.lineno} of the chat template: {error.message}") from error
        except (TemplateError, TypeError, AttributeError, LookupError, RecursionError) as error:
            # A template is a program of the model's authors; what it raises says what it does not take.
            raise ValueError(f"the chat template refuses it: {error}") from error


def read_arguments(call: dict[str, Any]) -> Any:
    """A call's arguments as a value, whichever way they are given; an empty text has none.

    Raises:
        ValueError: they are another text than JSON.
    """
    arguments = call["function"]["arguments"]
    if not isinstance(arguments, str):
        return arguments
    try:
        return strict_json(arguments or NO_ARGUMENTS, finite=False)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"arguments of {call['function']['name']} are no JSON: {error}") from error


def _call(arguments: Any, content: str | None) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": "functions.f:0", "type": "function", "function": function}],
    }
