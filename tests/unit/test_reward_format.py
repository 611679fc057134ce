"""Rewards for the form of texts: regular expressions, tags, JSON of a schema."""

import time

import pytest
from reward_cases import asked, said

from slimrl.rewards.format import Pattern, Tags
from slimrl.rewards.json_schema import JsonSchema, strict_json

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^[A-Z]"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
EARLIER = [{"role": "assistant", "content": "no form"}, {"role": "tool", "content": "r"}]


@pytest.mark.parametrize(("text", "reward"), [("Answer: 12 ", 1), ("x Answer: 12", 0), ("Answer: 12 x", 0), ("", 0)])
def test_a_pattern_matches_the_whole_text(text, reward):
    assert Pattern(pattern=r"Answer: \d+")(said(text), asked()) == reward


def test_every_text_or_the_last_one():
    given = said("Answer: 1", before=EARLIER), asked()
    assert Pattern(pattern=r"Answer: \d+")(*given) == 1
    assert Pattern(pattern=r"Answer: \d+", texts="every")(*given) == 0
    assert Pattern(pattern=r"Answer: \d+|no form", texts="every")(*given) == 1


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<plan>a</plan>\n<answer>b</answer>", 1),
        ("<answer>b</answer><plan>a</plan>", 0),
        ("<plan>a</plan><answer> </answer>", 0),
        ("<plan>a</plan> so <answer>b</answer>", 0),
        ("<plan>a</plan><answer>b</answer><answer>c</answer>", 0),
        ("<plan>a<answer>b</answer></plan><answer>c</answer>", 0),
        ("<plan>a</plan><answer>b", 0),
    ],
)
def test_tags_stand_once_in_order_with_nothing_between(text, reward):
    assert Tags(names=["plan", "answer"])(said(text), asked()) == reward


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: Pattern(pattern="("), r"pattern: '\(' is no regular expression"),
        (lambda: Pattern(pattern="a", texts="all"), "texts: 'all' is neither last nor every"),
        (lambda: Tags(names=[]), "names"),
        (lambda: Tags(names="plan"), "names"),
        (lambda: Tags(names=["a", "a"]), "names"),
        (lambda: JsonSchema(), "give schema or schema_key"),
        (lambda: JsonSchema(schema={"type": "nonsense"}), r"schema: .*\(at \$\.type\)"),
    ],
)
def test_wrong_settings_are_refused(make, problem):
    with pytest.raises(ValueError, match=problem):
        make()


def test_a_pattern_that_backtracks_for_ever_gives_up(monkeypatch):
    monkeypatch.setattr("slimrl.rewards.patterns.DEADLINE_S", 0.1)
    start = time.monotonic()
    assert Pattern(pattern="(a|aa)+")(said("a" * 60 + "!"), asked()) == 0
    schema = JsonSchema(schema={"type": "string", "pattern": "^(a|aa)+$"})
    assert schema(said('"' + "a" * 60 + '!"'), asked()) == 0
    assert time.monotonic() - start < 20


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ('{"name": "Ada", "age": 36}', 1),
        ('{"name": "ada", "age": 36}', 0),
        ('{"name": "Ada", "age": -1}', 0),
        ('{"name": "Ada"}', 0),
        ('{"name": "Ada", "age": 36, "x": 0}', 0),
        ('Here: {"name": "Ada", "age": 36}', 0),
    ],
)
def test_json_of_a_schema(text, reward):
    assert JsonSchema(schema=PERSON)(said(text), asked()) == reward
    assert JsonSchema(schema=PERSON, answer_in="code")(said(f"So:\n```json\n{text}\n```"), asked()) == reward
    assert JsonSchema(schema_key="form")(said(text), asked(form=PERSON)) == reward


def test_a_pattern_that_gives_up_is_no_match_of_its_opposite(monkeypatch):
    monkeypatch.setattr("slimrl.rewards.patterns.DEADLINE_S", 0.1)
    schema = JsonSchema(schema={"not": {"pattern": "^(a|aa)+$"}})
    assert schema(said('"' + "a" * 60 + '!"'), asked()) == 0
    assert schema(said('"aab"'), asked()) == 1


def test_keys_are_matched_with_a_deadline_too(monkeypatch):
    monkeypatch.setattr("slimrl.rewards.patterns.DEADLINE_S", 0.1)
    with pytest.raises(ValueError, match="schema: no patternProperties; use propertyNames"):
        JsonSchema(schema={"items": {"patternProperties": {"^(a|aa)+$": {"type": "number"}}}})
    schema = JsonSchema(schema={"propertyNames": {"pattern": "^(a|aa)+$"}, "additionalProperties": {"type": "number"}})
    assert schema(said('{"aaa": 1}'), asked()) == 1
    assert schema(said('{"' + "a" * 60 + '!": 1}'), asked()) == 0


def test_a_prompt_without_a_schema_is_an_error():
    with pytest.raises(KeyError):
        JsonSchema(schema_key="form")(said("1"), asked())
    with pytest.raises(ValueError, match=r"metadata\.form: "):
        JsonSchema(schema_key="form")(said("1"), asked(form={"type": 3}))


def test_a_schema_asks_no_other_machine():
    remote = JsonSchema(schema={"$ref": "http://127.0.0.1:9/schema.json"})
    with pytest.raises(Exception, match="Unresolvable"):
        remote(said("1"), asked())


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', "NaN", "[Infinity]", "1e999", "-1e999", "9" * 5000, "[1", ""])
def test_json_that_readers_disagree_about_is_none(text):
    with pytest.raises(ValueError):  # noqa: PT011 - json's own, of many texts
        strict_json(text)
