"""Data files in the layouts of their authors: Parquet, columns of other names, prompts of several turns."""

import gzip
import json
import re
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from slimrl.config.check import check_recipe
from slimrl.config.load import load_recipe
from slimrl.data import parquet
from slimrl.data.prompts import read_conversations, read_prompts

CALCULATOR = Path(__file__).parents[2] / "recipes" / "tiny_moe" / "gspo_calculator.yaml"
TURNS = [
    {"role": "user", "content": "Think of a number."},
    {"role": "assistant", "content": "7"},
    {"role": "user", "content": "Double it."},
]
VERL_KEYS = {"prompt": "prompt", "label": "reward_model.ground_truth"}


def both(folder: Path, rows: list[dict]) -> tuple[Path, Path]:
    """The same rows as JSONL and as Parquet."""
    lines, table = folder / "rows.jsonl", folder / "rows.parquet"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), table)
    return lines, table


def prompts_of(path: Path, keys: dict[str, str] | None = None) -> list[tuple]:
    return [(p.prompt_id, p.messages, p.label, p.metadata) for p in read_prompts(path, keys)]


def test_parquet_holds_the_prompts_that_the_same_lines_hold(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "BATCH_ROWS", 2)
    rows = [{"prompt": f"{i} + {i}?", "label": 2 * i, "metadata": {"digits": 1}} for i in range(5)]
    lines, table = both(tmp_path, rows)
    assert prompts_of(table) == prompts_of(lines)
    assert [label for _, _, label, _ in prompts_of(table)] == [0, 2, 4, 6, 8]
    assert read_prompts(table)[3].source == f"{table}:4"


def test_columns_of_other_names_are_read_and_the_rest_is_metadata(tmp_path):
    rows = [
        {"problem": "1+1?", "answer": "2", "ID": 60, "year": 2024},
        {"problem": "q", "answer": "a", "ID": 61, "year": 5},
    ]
    for path in both(tmp_path, rows):
        first, second = prompts_of(path, {"prompt": "problem", "label": "answer", "id": "ID"})
        assert first == ("60", [{"role": "user", "content": "1+1?"}], "2", {"year": 2024})
        assert second[0] == "61"
        (named, _) = prompts_of(path, {"prompt": "problem", "label": "answer"})
        assert (named[0], named[3]) == ("rows:1", {"ID": 60, "year": 2024})


def test_a_key_inside_a_column_is_read_as_verl_writes_it(tmp_path):
    row = {"data_source": "math", "prompt": TURNS[:1], "reward_model": {"ground_truth": "34", "style": "rule"}}
    for path in both(tmp_path, [row]):
        ((_, messages, label, metadata),) = prompts_of(path, VERL_KEYS)
        assert (messages, label) == (TURNS[:1], "34")
        assert metadata == {"data_source": "math", "reward_model": row["reward_model"]}
    dotted = {"prompt": "q", "reward_model.ground_truth": "whole name", "reward_model": {"ground_truth": "inside"}}
    for path in both(tmp_path, [dotted]):
        assert prompts_of(path, VERL_KEYS)[0][2] == "whole name"


def test_a_column_of_metadata_replaces_the_rest(tmp_path):
    row = {"question": "q", "answer": "a", "extra_info": {"split": "train"}, "other": 1}
    keys = {"prompt": "question", "label": "answer", "metadata": "extra_info"}
    for path in both(tmp_path, [row]):
        assert prompts_of(path, keys)[0][3] == {"split": "train"}


def test_a_prompt_may_be_a_list_of_messages(tmp_path):
    for path in both(tmp_path, [{"prompt": TURNS, "label": "14"}]):
        assert prompts_of(path)[0][1] == TURNS
    for path in both(tmp_path, [{"prompt": TURNS[:2], "label": "14"}]):
        with pytest.raises(ValueError, match="`prompt` ends with an assistant message"):
            read_prompts(path)
    for path in both(tmp_path, [{"prompt": [{"role": "robot", "content": "x"}], "label": "14"}]):
        with pytest.raises(ValueError, match=r"rows\.\w+:1: prompt\[0\]\.role is 'robot'"):
            read_prompts(path)


def test_every_broken_row_is_named_with_its_number(tmp_path):
    rows = [{"problem": "q", "answer": "a"}, {"problem": "", "answer": "a"}, {"problem": "q", "answer": None}]
    for path, noun in zip(both(tmp_path, rows), ("lines", "rows"), strict=True):
        with pytest.raises(ValueError, match=f"^2 broken {noun}:\n") as caught:
            read_prompts(path, {"prompt": "problem", "label": "answer"})
        assert str(caught.value).splitlines()[1:] == [
            f"{path}:2: `prompt` must be a non-empty string or a list of messages",
            f"{path}:3: answer is null, which is the label",
        ]


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"prompt": "problm", "label": "answer"}, "no column problm for `prompt`. Did you mean problem?"),
        ({"prompt": "text", "label": "answer"}, "no column text for `prompt`. It has problem, answer."),
        ({"prompt": "problem", "label": "answer.value"}, "no column answer.value for `label`."),
    ],
)
def test_a_column_that_is_not_there_is_named_with_what_the_file_has(tmp_path, keys, problem):
    for path in both(tmp_path, [{"problem": "q", "answer": "a"}]):
        with pytest.raises(ValueError, match=re.escape(f"{path}:1: {problem}")):
            read_prompts(path, keys)


def test_a_key_within_a_column_is_meant_as_a_whole(tmp_path):
    keys = {"prompt": "question", "label": "reward_model.groundtruth"}
    for path in both(tmp_path, [{"question": "q", "reward_model": {"style": "rule", "ground_truth": "4"}}]):
        meant = "no column reward_model.groundtruth for `label`. Did you mean reward_model.ground_truth?"
        with pytest.raises(ValueError, match=re.escape(f"{path}:1: {meant}")):
            read_prompts(path, keys)


def test_rows_of_parquet_lack_what_is_null_in_them(tmp_path):
    """A table has every column in every row, and every key in every structure."""
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    rows = [
        {"messages": [TURNS[0], call, {"role": "tool", "content": "7"}], "tools": [{"type": "function"}]},
        {"messages": TURNS[:2], "tools": None},
    ]
    lines, table = both(tmp_path, rows)
    assert "tool_calls" in pyarrow.parquet.read_table(table).to_pylist()[1]["messages"][0]
    read = [[(c.messages, c.tools) for c in read_conversations(path)] for path in (lines, table)]
    assert read[0] == read[1] == [(rows[0]["messages"], [{"type": "function"}]), (TURNS[:2], None)]
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(
            [{"prompt": "q", "messages": None, "label": 1}, {"prompt": None, "messages": TURNS, "label": 2}]
        ),
        table,
    )
    assert [messages for _, messages, _, _ in prompts_of(table)] == [[{"role": "user", "content": "q"}], TURNS]


def test_conversations_may_have_other_names_too(tmp_path):
    for path in both(tmp_path, [{"dialog": TURNS[:2], "score": 0.5}]):
        (conversation,) = read_conversations(path, {"messages": "dialog"})
        assert conversation.messages == TURNS[:2]


def test_a_damaged_an_empty_and_a_missing_parquet_file_are_refused(tmp_path):
    path = tmp_path / "rows.parquet"
    with pytest.raises(ValueError, match="no such file"):
        read_prompts(path)
    path.write_text('{"prompt": "q", "label": 1}\n')
    with pytest.raises(ValueError, match="not a whole Parquet file"):
        read_prompts(path)
    rows = [{"prompt": "q" * 100, "label": i} for i in range(100)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, compression="none", use_dictionary=False)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="not a whole Parquet file"):
        read_prompts(path)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows[:1]).slice(0, 0), path)
    with pytest.raises(ValueError, match=r"rows\.parquet: the file has no rows"):
        read_prompts(path)


@pytest.mark.parametrize(
    ("settings", "command", "said"),
    [
        (["data.keys={prompt: p, label: l}"], "train", []),
        (["data.keys={promt: p, label: l}"], "train", ["data.keys.promt", "data.keys"]),
        (["data.keys={prompt: p}"], "train", ["data.keys"]),
        (["data.keys={prompt: p, messages: m, label: l}"], "train", ["data.keys"]),
        (["data.keys={prompt: p, label: l}", "data.keys.label=null"], "train", ["data.keys"]),
        (["data.keys={messages: m, tools: t}", "sft.max_tokens=9"], "sft", []),
        (["data.keys={messages: m, label: t}", "sft.max_tokens=9"], "sft", ["data.keys.label"]),
        (["data.keys={prompt: p}", "data.eval_keys={prompt: p, label: l}"], "eval", []),
        (["data.keys={prompt: p}"], "eval", ["data.keys"]),
        (["data.eval_keys={prompt: p}"], "eval", ["data.eval_keys"]),
    ],
)
def test_names_that_a_command_does_not_read_are_refused(settings, command, said):
    recipe = load_recipe(CALCULATOR, settings, command).recipe
    assert [p.key for p in check_recipe(recipe, None, command) if p.key.startswith("data.")] == said


def test_evaluation_sets_have_the_columns_of_the_training_file_unless_others_are_named():
    keys, other = {"prompt": "problem", "label": "answer"}, {"prompt": "prompt", "label": "label"}
    given = "data.keys={prompt: problem, label: answer}"
    assert load_recipe(CALCULATOR, [given]).recipe.data.keys_of_eval == keys
    own = load_recipe(CALCULATOR, [given, "data.eval_keys={prompt: prompt, label: label}"]).recipe.data
    assert (own.keys, own.keys_of_eval) == (keys, other)


def test_damaged_pages_of_parquet_are_refused_with_their_file(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["question"] * 2000, "label": list(range(2000))}), path)
    whole = path.read_bytes()
    path.write_bytes(whole[:4] + b"\xff" * 400 + whole[404:])
    with pytest.raises(ValueError, match=r"a\.parquet: not a whole Parquet file"):
        read_prompts(path)


VALUES = [
    (datetime(2024, 1, 1), "is of type datetime"),
    (date(2024, 1, 1), "is of type date"),
    (time(1, 2), "is of type time"),
    (timedelta(seconds=1), "is of type timedelta"),
    (b"raw", "is of type bytes"),
    (Decimal("1.5"), "is of type Decimal"),
    (float("nan"), "is nan"),
    (float("-inf"), "is -inf"),
]


@pytest.mark.parametrize(("value", "problem"), VALUES)
@pytest.mark.parametrize("place", ["label", "metadata.extra", "metadata.inner.deep[1].x"])
def test_what_json_does_not_have_is_refused_by_its_row(tmp_path, value, problem, place):
    def row(one):
        label, extra, deep = (one if name in place else None for name in ("label", "extra", "deep"))
        return {"q": "1+1?", "a": label or "2", "extra": extra, "inner": {"deep": [{"x": None}, {"x": deep}]}}

    good = {"q": "1+1?", "a": "2", "extra": None, "inner": {"deep": []}}
    table = tmp_path / "rows.parquet"
    keys = {"prompt": "q", "label": "a"}
    rows = [row(value), good, row(value)] if place != "label" else [row(value), row(value)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), table)
    with pytest.raises(ValueError, match=re.escape(f"{place} {problem}, which JSON does not have")) as refused:
        read_prompts(table, keys)
    lines = [line.split(": ")[0] for line in str(refused.value).splitlines() if line.startswith(str(table))]
    assert lines == [f"{table}:{number}" for number, one in enumerate(rows, 1) if one is not good]


def test_a_column_that_is_not_read_may_hold_anything(tmp_path):
    table = tmp_path / "rows.parquet"
    rows = [{"q": "1+1?", "a": "2", "when": datetime(2024, 1, 1), "about": {"k": 1}}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), table)
    ((_, _, label, metadata),) = prompts_of(table, {"prompt": "q", "label": "a", "metadata": "about"})
    assert (label, metadata) == ("2", {"k": 1})


def test_compressed_lines_are_read_and_broken_ones_named(tmp_path):
    lines = b'{"prompt": "a", "label": 1}\n\n{"prompt": "b", "label": 2}\n'
    file = tmp_path / "train.jsonl.gz"
    file.write_bytes(gzip.compress(lines))
    assert [prompt.prompt_id for prompt in read_prompts(file)] == ["train:1", "train:3"]
    file.write_bytes(gzip.compress(lines + b"{\n"))
    with pytest.raises(ValueError, match=rf"^{re.escape(str(file))}:4: not JSON"):
        read_prompts(file)
    for damaged in (lines, gzip.compress(lines * 99)[:-9], gzip.compress(lines)[:20] + b"x" * 40):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"^{re.escape(str(file))}: not a whole gzip file"):
            read_prompts(file)


def test_a_byte_order_mark_is_no_part_of_a_line(tmp_path):
    file = tmp_path / "train.jsonl"
    line = '{"prompt": "a", "label": 1}\n'
    file.write_bytes((line + line).encode("utf-8-sig") + line.encode("utf-8-sig"))
    assert [prompt.label for prompt in read_prompts(file)] == [1, 1, 1]


def test_null_in_a_message_means_that_the_key_is_not_there(tmp_path):
    messages = [
        {"role": "user", "content": "a", "name": None},
        {"role": "assistant", "content": "b", "tool_calls": None},
    ]
    rows = [{"messages": messages}, {"messages": [*messages, {"role": "user", "content": "c"}]}]
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(rows[0]) + "\n")
    (conversation,) = read_conversations(file)
    assert conversation.messages == [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    file.write_text(json.dumps(rows[1] | {"label": 1}) + "\n")
    (prompt,) = read_prompts(file)
    assert prompt.messages == [*conversation.messages, {"role": "user", "content": "c"}]
