"""The reserved tokens of a tokenizer: texts that are one token wherever they stand, such as the markers of turns."""

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARKER = re.compile(r"<[^\s<>]*[^\W_][^\s<>]*>|\[[A-Z_]*[A-Z][A-Z_]*\]")
"""Pattern of a text in brackets that may be a reserved token. It has a letter or digit: `<=>` and `[_]` are words of
code, and tokens of many vocabularies."""


def reserved_tokens(tokenizer: "PreTrainedTokenizerBase") -> dict[str, int]:
    """Ids of the reserved tokens, by their texts.

    Those that transformers lists. Of tokenizers with code of their own (Kimi-K2, Moonlight), which know more than they
    list, also others of the vocabulary in angle or square brackets that they find in the middle of a word.
    """
    listed = {token.content: number for number, token in tokenizer.added_tokens_decoder.items()}
    if tokenizer.is_fast:
        return listed  # the same that its backend looks for
    others = {
        text: number
        for text, number in tokenizer.get_vocab().items()
        if text not in listed
        and _MARKER.fullmatch(text)
        and number in tokenizer(f"a{text}a", add_special_tokens=False)["input_ids"]
    }
    return {**listed, **others}
