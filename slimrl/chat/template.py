"""The tokenizer's chat template: messages to text, text to tokens, and back."""

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

Messages = Sequence[dict[str, Any]]
Schemas = Sequence[dict[str, Any]] | None

_KEY, _VALUE = "probe_key", "probe_value"


class ChatTemplate:
    """A tokenizer with its chat template.

    Args:
        tokenizer: a fast tokenizer.
        text: the template in Jinja; None for the tokenizer's own.
        kwargs: further variables of the template, such as `enable_thinking`.

    Raises:
        ValueError: there is no template.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, text: str | None = None, kwargs: dict[str, Any] | None = None
    ) -> None:
        if text is None and not tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template; name a file of one in model.chat_template")
        self._tokenizer = tokenizer
        self._text = text
        self._kwargs = dict(kwargs or {})
        self._reserved = sorted((token.content for token in tokenizer.added_tokens_decoder.values()), key=len)[::-1]

    def render(self, messages: Messages, schemas: Schemas, *, generate: bool) -> str:
        """Text of a conversation.

        Args:
            schemas: JSON schemas of the tools that the model is shown.
            generate: with the header of the assistant's next turn.

        Raises:
            ValueError: the template refuses these messages.
        """
        return self._apply(self._with_arguments(messages), schemas, add_generation_prompt=generate, tokenize=False)

    def marked(self, messages: Messages, schemas: Schemas) -> tuple[list[int], list[bool]] | None:
        """(tokens, mask) of a conversation by the template's `{% generation %}` marks; None if it has none.

        The mask is true on what the template marks as the assistant's.
        """
        if not self._has_marks:
            return None
        encoding = self._apply(
            self._with_arguments(messages), schemas, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
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
        for reserved in self._reserved:
            text = text.replace(reserved, f"{reserved[0]} {reserved[1:]}")
        return text

    @cached_property
    def _has_marks(self) -> bool:
        text = self._text if self._text is not None else self._tokenizer.get_chat_template()
        return "{% generation" in text or "{%- generation" in text

    @cached_property
    def _arguments_are_text(self) -> bool:
        """Whether the template wants a call's arguments as JSON text instead of an object."""
        question = {"role": "user", "content": "q"}
        try:
            text = self._apply([question, _call({_KEY: _VALUE})], None, tokenize=False)
        except ValueError:
            return True
        # A template that joins texts writes an object as Python does, in single quotes.
        return f"'{_KEY}'" in text

    def _with_arguments(self, messages: Messages) -> list[dict[str, Any]]:
        """The messages with each call's arguments as the template wants them, whichever way they are given."""
        return [
            message | {"tool_calls": [self._with_own_arguments(call) for call in message["tool_calls"]]}
            if message.get("tool_calls")
            else message
            for message in messages
        ]

    def _with_own_arguments(self, call: dict[str, Any]) -> dict[str, Any]:
        arguments = call["function"]["arguments"]
        if self._arguments_are_text:
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
        elif isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"arguments of {call['function']['name']} are no JSON: {error}") from error
        return {"type": "function", **call, "function": {**call["function"], "arguments": arguments}}

    def _apply(self, messages: Messages, schemas: Schemas, **options: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(schemas) if schemas else None,
                chat_template=self._text,
                **self._kwargs,
                **options,
            )
        except (TemplateError, TypeError, AttributeError, LookupError) as error:
            # A template is a program of the model's authors; what it raises says what it does not take.
            raise ValueError(f"the chat template refuses it: {error}") from error


def _call(arguments: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "functions.f:0", "type": "function", "function": function}],
    }
