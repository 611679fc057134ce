"""Random conversations of every kind of model: what joins two turns is what transformers renders, token for token."""

import pytest
from chat_templates import MODELS
from chat_texts import (
    PLAYED,
    TOOLS,
    Script,
    answer_end,
    answer_text,
    call_end,
    call_text,
    play,
    rendering,
    thought_text,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slimrl.agent.tools import ToolAnswer
from slimrl.data.trajectory import Status

KEYS = [key for key in PLAYED if key not in ("hermes3", "deepseek_r1", "deepseek_v3", "kimi_k2_0711", "qwq")]
"""Those whose templates write each later turn of an episode as the policy does"""
ANY = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
WORDS = st.text(
    st.characters(exclude_categories=["Cs", "Cc", "Zs", "Zl", "Zp"], exclude_characters="<>[]{}|｜/"),
    min_size=1,
    max_size=20,
)
"""Without what a format gives a meaning to, or strips at an end."""
NUMBERS = st.integers(-(10**6), 10**6)
TURNS = st.lists(
    st.tuples(WORDS, st.lists(st.tuples(NUMBERS, NUMBERS, WORDS), min_size=1, max_size=3), st.lists(ANY, min_size=3)),
    min_size=1,
    max_size=3,
)
"""(thinking, calls, results) of each turn."""


class Answers:
    """Tools that answer with these texts in turn."""

    schemas = TOOLS.schemas

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    caches = False

    async def for_episode(self):
        return self

    async def end_episode(self):
        pass

    async def call(self, name, arguments, timeout_s, info):
        return ToolAnswer(text=self.texts.pop(0))


def check(key: str, turns) -> None:
    model = MODELS[key]
    if key.startswith("glm"):
        # SGLang spells text that reads as JSON anew: true becomes True, NaN nan.
        turns = [(thought, [(a, b, f"n{note}") for a, b, note in calls], rest) for thought, calls, rest in turns]
    texts, results, count = [], [], 0
    for number, (thought, calls, answers) in enumerate(turns):
        kept = calls if model.parallel else calls[:1]
        arguments = [{"a": a, "b": b, "note": note} for a, b, note in kept]
        said = call_text(key, *arguments, first_id=count)
        texts.append(thought_text(key, thought, after_tools=bool(number)) + said + call_end(key))
        results += answers[: len(kept)]
        count += len(kept)
    texts.append(answer_text(key, "Done.") + answer_end(key))
    engine = Script(model, *texts)
    trajectory = play(model, engine, tools=Answers(list(results)), max_turns=8, max_trajectory_tokens=10**6)
    assert trajectory.status is Status.completed
    assert trajectory.metadata["num_malformed_calls"] == 0
    calls = [call["function"]["arguments"] for m in trajectory.messages for call in m.get("tool_calls", ())]
    assert calls == [
        {"a": a, "b": b, "note": note} for _, turn, _ in turns for a, b, note in (turn if model.parallel else turn[:1])
    ]
    tokenizer = model.tokenizer()
    answers = [number for number, message in enumerate(trajectory.messages) if message["role"] == "assistant"]
    for number, place in enumerate(answers):
        rendered = rendering(key, trajectory.messages[:place], generate=True)
        if model.rewrites and number:
            last = texts[number - 1].rpartition("</think>")[2]
            position = rendered.rindex(last) + len(last)
            said_so_far = engine.contexts[number - 1] + engine.said[number - 1]
            expected = said_so_far + tokenizer(rendered[position:], add_special_tokens=False).input_ids
        else:
            expected = tokenizer(rendered, add_special_tokens=False).input_ids
        assert engine.contexts[number] == expected
    segment = trajectory.segments[0]
    assert segment.tokens[segment.loss_mask].tolist() == [token for turn in engine.said for token in turn]


def examples(count: int):
    return settings(max_examples=count, deadline=None, database=None, derandomize=True,
                    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])  # fmt: skip


@pytest.mark.parametrize("key", KEYS)
def test_random_conversations_join_as_the_template_renders_them(key):
    examples(25)(given(TURNS)(lambda turns: check(key, turns)))()


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("key", KEYS)
def test_ten_thousand_random_conversations_join_as_the_template_renders_them(key):
    examples(10_000)(given(TURNS)(lambda turns: check(key, turns)))()
