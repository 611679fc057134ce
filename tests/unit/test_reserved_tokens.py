"""Reserved tokens that a tokenizer does not list (Kimi-K2, Moonlight) lose their meaning in results too."""

from typing import ClassVar

import pytest
from slimrl_tools.toy.toy_tokenizer import build_tokenizer
from transformers import PreTrainedTokenizer

from slimrl.agent.chat.reserved import reserved_tokens
from slimrl.agent.chat.stop_tokens import checked_stop_tokens
from slimrl.agent.chat.template import ChatTemplate

UNLISTED = ["<|tool_call_begin|>", "<|tool_call_end|>", "[EOT]", "<|reserved_token_7|>"]
WORDS = ["ab", "<div", "[A", "->", "<=>", "[_]"]


class Tokens(PreTrainedTokenizer):
    """Finds its reserved tokens itself, as tiktoken does, and lists only those of its configuration."""

    vocab_files_names: ClassVar[dict[str, str]] = {}

    def __init__(self, **options):
        characters = [chr(code) for code in range(32, 127)] + ["\n"]
        self.ids = {text: number for number, text in enumerate([*characters, *WORDS, *UNLISTED])}
        self.longest_first = sorted(UNLISTED + WORDS, key=len)[::-1]
        super().__init__(**options)

    @property
    def vocab_size(self):
        return len(self.ids)

    def get_vocab(self):
        return self.ids | self.added_tokens_encoder

    def _tokenize(self, text, **options):
        found = []
        while text:
            # Words of several letters stand for themselves alone, as an ordinary vocabulary splits at their ends.
            first = next((one for one in self.longest_first if text.startswith(one)), text[0])
            found.append(first)
            text = text[len(first) :]
        return found

    def _convert_token_to_id(self, token):
        return self.ids[token]

    def _convert_id_to_token(self, index):
        return next(text for text, number in self.ids.items() if number == index)

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokens(eos_token="<|im_end|>", chat_template="{{ messages[0].content }}")


def test_reserved_are_the_listed_ones_and_markers_that_stand_within_words(tokenizer):
    assert set(reserved_tokens(tokenizer)) == {"<|im_end|>", *UNLISTED}
    assert reserved_tokens(tokenizer)["[EOT]"] == tokenizer.ids["[EOT]"]


def test_a_result_that_quotes_a_call_holds_no_marker(tokenizer):
    template = ChatTemplate(tokenizer)
    quoted = f"I said {''.join(UNLISTED)}<|im_end|> and <div> [A] <=> [_] -> ab"
    tokens = template.encode(template.escape(quoted))
    reserved = set(reserved_tokens(tokenizer).values())
    assert reserved & set(template.encode(quoted)) == reserved
    assert not reserved & set(tokens)
    words = "<div> [A] <=> [_] -> ab <b>"
    assert template.escape(words) == words


def test_an_unlisted_reserved_token_may_end_a_turn_and_a_word_may_not(tokenizer, monkeypatch):
    end = tokenizer.ids["[EOT]"]
    reserved = ChatTemplate(tokenizer).reserved
    # The whole vocabulary is looked through once, for the template.
    monkeypatch.setattr(tokenizer, "get_vocab", None)
    assert checked_stop_tokens([end], tokenizer, reserved) == (end,)
    with pytest.raises(ValueError, match="ordinary text that an answer may hold"):
        checked_stop_tokens([tokenizer.ids["ab"]], tokenizer, reserved)


def test_a_tokenizer_that_lists_all_has_no_others():
    """Tags may be words of an ordinary vocabulary."""
    toy = build_tokenizer()
    assert "<tools>" in toy.get_vocab()
    assert set(reserved_tokens(toy)) == {token.content for token in toy.added_tokens_decoder.values()}
