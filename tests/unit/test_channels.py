"""Turns of gpt-oss: thinking and answer on their channels, and what follows an answer."""

import pytest
from chat_templates import MODELS

from slimrl.agent.chat.channels import split_channels
from slimrl.agent.chat.thinking import Thought

ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>{}"


@pytest.mark.parametrize(
    ("turn", "thinking", "answer", "closed"),
    [
        (f"{FINAL}Four.", None, "Four.", True),
        (f"{ANALYSIS} Two and two. {NEXT}{FINAL}Four.", "Two and two.", "Four.", True),
        (f"{ANALYSIS}a{NEXT}{ANALYSIS}b{NEXT}{FINAL}c", "a\nb", "c", True),
        (f"{ANALYSIS}a{NEXT}<|channel|>commentary<|message|>I add.{NEXT}{FINAL}c", "a", "I add.\nc", True),
        (f"{ANALYSIS}not finished", "not finished", "", False),
        (f"{ANALYSIS}finished<|end|>", "finished", "", True),
        (f"{ANALYSIS}a{NEXT}{CALL}", "a", CALL, True),
        ("words alone", None, "words alone", True),
        ("", None, "", True),
    ],
)
def test_a_turn_is_told_apart_by_its_channels(turn, thinking, answer, closed):
    assert split_channels(turn) == Thought(thinking=thinking, answer=answer, closed=closed)


def test_a_question_follows_an_answer_that_ended_with_return():
    """What serving shows ends it with <|end|>; the rest is the same."""
    chat = MODELS["gpt_oss"].chat()
    chat.require_ends()
    ended, called = (chat.token_id(text) for text in ("<|return|>", "<|call|>"))
    assert chat.answer_ends == {ended}
    joined = chat.join(ended, [], [{"role": "user", "content": "And?"}], None)
    assert chat.template.decode(joined.tokens) == "<|start|>user<|message|>And?<|end|><|start|>assistant"
    assert not joined.opens_thinking
    with pytest.raises(ValueError, match=r"writes no '<\|call\|>' after an answer"):
        chat.join(called, [], [{"role": "user", "content": "And?"}], None)
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    ((tokens, mask),) = chat.training_sequences(messages, None)
    learned = [token for token, learn in zip(tokens, mask, strict=True) if learn]
    assert chat.template.decode(learned) == f"{FINAL}a<|return|>"
