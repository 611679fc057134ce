"""Conversations as token ids, through the tokenizer's own chat template.

1. A prompt is rendered with the tools' schemas and the header of the assistant's turn.
2. After the policy's turn, the tokens of the tool results are taken from a rendering of a stand-in conversation:
   what it holds after the policy's last token. So they do not depend on the sampled text, which is never tokenized
   again, and a turn that was stopped at its tool call gets its end-of-turn token from the template.
3. A conversation to learn from is rendered once; where the assistant's turns lie in it is found by rendering it up to
   each of them, and each rendering must be a prefix of the whole.
"""

from collections.abc import Sequence
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerFast

Messages = list[dict[str, Any]]
Schemas = Sequence[dict[str, Any]] | None

_QUESTION: dict[str, Any] = {"role": "user", "content": "q"}
_CALL: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call_0", "type": "function", "function": {"name": "f", "arguments": {}}}],
}


class ChatFormat:
    """The chat template of one tokenizer.

    Args:
        tokenizer: a fast tokenizer with a chat template.

    Raises:
        ValueError: there is no chat template, it marks no end of the assistant's turn, or its rendering of a prompt is
            no prefix of its rendering of the conversation that follows.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        if not tokenizer.is_fast:
            raise ValueError("the tokenizer must be a fast one (tokenizer.json); this one is not")
        if tokenizer.chat_template is None:
            raise ValueError("the tokenizer has no chat template")
        self._tokenizer = tokenizer
        self._reserved = sorted((token.content for token in tokenizer.added_tokens_decoder.values()), key=len)[::-1]
        self._question = self._render([_QUESTION], None, generate=True)
        self.end_of_turn_id = self._find_end_of_turn()
        """Id of the token that ends the assistant's turn."""

    def token_id(self, text: str) -> int:
        """Id of a text that is one token, such as the marker that closes a tool call.

        Raises:
            ValueError: it is not one token of this tokenizer.
        """
        ids = self._encode(text)
        if len(ids) != 1:
            raise ValueError(f"{text} is {len(ids)} tokens of this tokenizer; it must be one to stop at it")
        return ids[0]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens, markers included."""
        text = self._tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def without_reserved(self, text: str) -> str:
        """The text with a space put into whatever it holds that the tokenizer would read as a reserved token.

        A tool's result must not end a turn or open one.
        """
        for reserved in self._reserved:
            text = text.replace(reserved, f"{reserved[0]} {reserved[1:]}")
        return text

    def prompt_tokens(self, messages: Messages, schemas: Schemas) -> list[int]:
        """Token ids of a prompt up to where the assistant begins to write.

        Raises:
            ValueError: the template refuses these messages.
        """
        return self._encode(self._render(messages, schemas, generate=True))

    def tool_turn_tokens(self, last_token: int, results: Sequence[str]) -> list[int]:
        """Token ids that follow the policy's turn when tools have answered, up to where it writes again.

        Args:
            last_token: the token at which the policy stopped: the end of the turn, or what closes its tool call.
            results: one text per call, in order, already free of reserved tokens.

        Raises:
            ValueError: the template never writes `last_token` at the end of a turn with a tool call.
        """
        answers = [
            {"role": "tool", "name": "f", "tool_call_id": f"call_{number}", "content": result}
            for number, result in enumerate(results)
        ]
        turn = self._encode(_rest(self._question, self._render([_QUESTION, _CALL, *answers], None, generate=True)))
        if last_token not in turn:
            raise ValueError(f"the chat template writes no {self.decode([last_token])!r} after a tool call")
        return turn[turn.index(last_token) + 1 :]

    def conversation_tokens(self, messages: Messages, schemas: Schemas) -> tuple[list[int], list[bool]]:
        """Token ids of a whole conversation and which of them are the assistant's.

        Returns:
            (tokens, mask), equally long; the mask is true on what the assistant writes, the end of its turn included.

        Raises:
            ValueError: the template refuses these messages, or it renders earlier turns differently as the
                conversation goes on, so that no context of the assistant's turn is part of the whole.
        """
        text = self._render(messages, schemas, generate=False)
        encoding = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        tokens: list[int] = encoding["input_ids"]
        position_of = {
            start: position for position, (start, _) in reversed(list(enumerate(encoding["offset_mapping"])))
        }
        mask = [False] * len(tokens)
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:number], schemas, generate=True)
            _rest(before, text)
            first = position_of.get(len(before))
            if first is None:
                raise ValueError(f"messages[{number}] does not begin at a token boundary")
            last = tokens.index(self.end_of_turn_id, first)
            mask[first : last + 1] = [True] * (last + 1 - first)
        return tokens, mask

    def _find_end_of_turn(self) -> int:
        answer = {"role": "assistant", "content": "a"}
        turn = self._encode(_rest(self._question, self._render([_QUESTION, answer], None, generate=False)))
        reserved = set(self._tokenizer.added_tokens_decoder)
        for token in turn[1:]:
            if token in reserved:
                return token
        raise ValueError("the chat template puts no reserved token at the end of the assistant's turn")

    def _render(self, messages: Messages, schemas: Schemas, *, generate: bool) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tools=list(schemas) if schemas else None, tokenize=False, add_generation_prompt=generate
            )
        except TemplateError as error:
            raise ValueError(f"the chat template refuses it: {error}") from error
        assert isinstance(text, str)
        return text

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]


def _rest(prefix: str, text: str) -> str:
    if not text.startswith(prefix):
        raise ValueError(
            "the chat template renders a prompt differently once the assistant has answered: "
            f"{prefix[-80:]!r} is not in what follows"
        )
    return text[len(prefix) :]
