"""Prompt and conversation files, and the order in which training goes through them."""

import json
import re

import pytest

from slimrl.base.rows import BrokenRows
from slimrl.data.prompts import Sampler, read_conversations, read_prompts


def write(path, *lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def test_a_prompt_text_becomes_one_user_message_and_gets_an_id_from_its_line(tmp_path):
    path = write(tmp_path / "train.jsonl", {"prompt": "1+1?", "label": 2}, "", {"prompt": "q", "label": "a", "id": "x"})
    first, second = read_prompts(path)
    assert first.messages == [{"role": "user", "content": "1+1?"}]
    assert (first.prompt_id, first.label, first.metadata) == ("train:1", 2, {})
    assert second.prompt_id == "x"


def test_messages_and_metadata_are_kept_as_they_are(tmp_path):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path = write(tmp_path / "p.jsonl", {"messages": messages, "label": None, "metadata": {"source": "book"}})
    (prompt,) = read_prompts(path)
    assert (prompt.messages, prompt.label, prompt.metadata) == (messages, None, {"source": "book"})


BROKEN_PROMPTS = [
    ("{", "not JSON"),
    ("[1]", "must be a JSON object, not list"),
    ({"prompt": "q"}, "`label` is missing"),
    ({"label": 1}, "exactly one of `prompt` and `messages`"),
    ({"prompt": "q", "messages": [], "label": 1}, "exactly one of"),
    ({"prompt": "", "label": 1}, "`prompt` must be a non-empty string"),
    ({"prompt": "q", "lable": 1}, "unknown key lable"),
    ({"messages": [{"role": "robot", "content": ""}], "label": 1}, "messages[0].role is 'robot'"),
    ({"messages": [{"role": "user"}], "label": 1}, "messages[0].content must be a string"),
    ({"messages": [{"role": "assistant", "content": "a"}], "label": 1}, "ends with an assistant message"),
    ({"prompt": "q", "label": 1, "metadata": 3}, "`metadata` must be an object"),
    ({"prompt": "q", "label": 1, "id": "same"}, "id same is also the id of line 1"),
    ({"prompt": 3, "label": 1}, "`prompt` must be a non-empty string"),
    ({"messages": [], "label": 1}, "`messages` must be a non-empty list"),
    ({"messages": {"role": "user"}, "label": 1}, "`messages` must be a non-empty list"),
    ({"messages": ["q"], "label": 1}, "messages[0] must be an object"),
    ({"prompt": "q", "label": 1, "id": ""}, "`id` must be a non-empty string"),
    ({"prompt": "q", "label": 1, "id": 7}, "`id` must be a non-empty string"),
    ({"messages": [{"role": "user", "content": None}], "label": 1}, "messages[0].content must be a string"),
    ({"prompt": "q", "label": 1, "tools": []}, "unknown key tools; known are id, label, messages, metadata, prompt"),
]


def test_every_broken_line_is_named_in_one_error(tmp_path):
    path = write(tmp_path / "p.jsonl", {"prompt": "q", "label": 1, "id": "same"}, *(line for line, _ in BROKEN_PROMPTS))
    with pytest.raises(ValueError, match="20 broken lines") as caught:
        read_prompts(path)
    lines = str(caught.value).splitlines()
    for number, (_, problem) in enumerate(BROKEN_PROMPTS, 2):
        assert lines[number - 1].startswith(f"{path}:{number}: ")
        assert problem in lines[number - 1]


def test_no_more_than_twenty_broken_lines_are_shown_and_the_rest_is_counted(tmp_path):
    path = write(tmp_path / "p.jsonl", *({"k" * number: 1} for number in range(1, 34)))
    with pytest.raises(ValueError, match=r"^33 broken lines:\n") as caught:
        read_prompts(path)
    lines = str(caught.value).splitlines()
    assert lines[1].startswith(f"{path}:1: ")
    assert (len(lines), lines[-1]) == (22, "and 13 more")


def test_a_missing_an_empty_and_a_non_utf8_file_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        read_prompts(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="has no lines"):
        read_prompts(write(tmp_path / "empty.jsonl", ""))
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9", "label": 1}\n')
    with pytest.raises(ValueError, match=r"latin\.jsonl:1: not UTF-8"):
        read_prompts(tmp_path / "latin.jsonl")


CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}


def test_a_conversation_keeps_its_calls_its_tools_and_where_it_stands(tmp_path):
    messages = [{"role": "user", "content": "u"}, CALL, {"role": "tool", "content": "1"}]
    path = write(tmp_path / "sft.jsonl", {"messages": messages, "tools": [{"type": "function"}]})
    (conversation,) = read_conversations(path)
    assert conversation.messages == messages
    assert conversation.tools == [{"type": "function"}]
    assert conversation.source == f"{path}:1"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ({"tools": []}, "`messages` is missing"),
        ({"messages": [{"role": "user", "content": "u"}]}, "no assistant message"),
        ({"messages": [{"role": "assistant", "content": "a"}], "tools": {}}, "`tools` must be a list"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"name": "f"}]}]}, "function.name is missing"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]},
            "arguments must be an object",
        ),
        ({"messages": [{"role": "user", "content": "u", "tool_calls": []}]}, "in an assistant message"),
        ({"messages": [{"role": "assistant", "content": "a"}], "tool": []}, "unknown key tool; known are id, messages"),
        ({"messages": []}, "`messages` must be a non-empty list"),
        (
            {"messages": [{"role": "assistant", "content": "a"}], "tools": ["f"]},
            "`tools` must be a list of JSON schemas",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": {}}]}, "tool_calls must be a list"),
        ({"messages": [{"role": "assistant", "tool_calls": ["f"]}]}, "tool_calls[0].function.name is missing"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": 1}}]}]}, "name is missing"),
        ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages[0].content must be a string"),
    ],
)
def test_a_broken_conversation_is_named(tmp_path, line, problem):
    with pytest.raises(ValueError, match=r"sft\.jsonl:1: ") as caught:
        read_conversations(write(tmp_path / "sft.jsonl", line))
    assert problem in str(caught.value)


def test_a_conversation_may_have_no_tools_and_arguments_as_text(tmp_path):
    called = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    messages = [{"role": "user", "content": ""}, called]
    lines = [{"messages": messages, "tools": []}, {"messages": messages, "id": "x", "metadata": {"a": 1}}]
    first, second = read_conversations(write(tmp_path / "sft.jsonl", *lines))
    assert (first.tools, first.messages) == (None, messages)
    assert second.source == f"{tmp_path / 'sft.jsonl'}:2"


def test_each_epoch_has_every_item_once_in_another_order():
    sampler = Sampler(range(100), seed=3, shuffle=True)
    first, second = sampler.take(100), sampler.take(100)
    assert sorted(first) == sorted(second) == list(range(100))
    assert first != second


def test_the_seed_alone_decides_the_order_and_without_shuffling_it_is_the_files():
    assert Sampler(range(50), seed=3, shuffle=True).take(70) == Sampler(range(50), seed=3, shuffle=True).take(70)
    assert Sampler(range(50), seed=3, shuffle=True).take(50) != Sampler(range(50), seed=4, shuffle=True).take(50)
    assert Sampler(range(3), seed=3, shuffle=False).take(5) == [0, 1, 2, 0, 1]


@pytest.mark.parametrize("taken", [0, 7, 10, 23])
def test_a_restored_sampler_goes_on_with_what_would_have_come_next(taken):
    uninterrupted = Sampler(range(10), seed=1, shuffle=True)
    uninterrupted.take(taken)
    resumed = Sampler(range(10), seed=1, shuffle=True)
    resumed.restore(json.loads(json.dumps(uninterrupted.state())))
    assert resumed.take(25) == uninterrupted.take(25)


def test_a_position_is_the_epoch_and_the_items_of_it_that_were_taken():
    sampler = Sampler("abcd", seed=1, shuffle=False)
    for taken, epoch, index in ((0, 0, 0), (3, 0, 3), (1, 0, 4), (1, 1, 1), (10, 3, 3)):
        sampler.take(taken)
        assert sampler.state() == {"epoch": epoch, "index": index, "num_items": 4}
    with pytest.raises(ValueError, match="at least one item"):
        Sampler([], seed=1, shuffle=False)


def test_items_that_are_left_out_are_skipped_in_every_epoch_and_the_order_of_the_others_stays():
    whole, without = Sampler(range(10), seed=1, shuffle=True), Sampler(range(10), seed=1, shuffle=True)
    without.leave_out(lambda item: item in (2, 7))
    taken = without.take(13)
    assert taken == [item for item in whole.take(30) if item not in (2, 7)][:13]
    resumed = Sampler(range(10), seed=1, shuffle=True)
    resumed.restore(without.state())
    # Nothing is left out there, but what was skipped is behind it.
    rest = without.take(20)
    assert [item for item in resumed.take(40) if item not in (2, 7)][:20] == rest
    with pytest.raises(ValueError, match="all 10 items are left out"):
        without.leave_out(lambda item: True)


def test_a_position_in_another_file_is_refused():
    with pytest.raises(ValueError, match="data with 10 items, but there are 11 now"):
        Sampler(range(11), seed=1, shuffle=True).restore(Sampler(range(10), seed=1, shuffle=True).state())


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"prompt": "q", "label": ', "Expecting value at column 25, the line's end"),
        ('{"prompt": "q"', "Expecting ',' delimiter at column 15, the line's end"),
        ("{'prompt': 1}", "Expecting property name enclosed in double quotes at column 2"),
        ('{"prompt": "q', "Unterminated string starting at column 12"),
    ],
)
def test_what_is_no_json_is_named_with_its_column(tmp_path, line, problem):
    path = write(tmp_path / "p.jsonl", line)
    with pytest.raises(ValueError, match=f"^{re.escape(f'{path}:1: not JSON: {problem}')}$"):
        read_prompts(path)


CONVERSATION = '{"messages": [{"role": "assistant", "content": %s}]}'


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("[" * 5000 + "]" * 5000, "lists and objects are nested more than 100 deep"),
        ("[" * 100 + "1" + "]" * 100, "lists and objects are nested more than 100 deep"),
        (r'"half: \ud83d"', r"\ud83d is half of a surrogate pair, without the other half"),
        (r'{"\uDE00": 1}', r"\ude00 is half of a surrogate pair, without the other half"),
        ("NaN", "NaN is not a JSON number"),
        ("[-Infinity]", "-Infinity is not a JSON number"),
        ("-1e999", "-1e999 is too large for a 64-bit float"),
        ('{"x": 1, "y": {}, "x": 1}', "duplicate key x"),
    ],
)
def test_what_json_allows_and_a_run_cannot_carry_is_a_broken_line(tmp_path, content, problem):
    prompts = write(tmp_path / "p.jsonl", {"prompt": "q", "label": 1}, f'{{"prompt": "q", "label": {content}}}')
    conversations = write(tmp_path / "c.jsonl", CONVERSATION % '"a"', CONVERSATION % content)
    for path, read in ((prompts, read_prompts), (conversations, read_conversations)):
        with pytest.raises(ValueError, match=f"^{re.escape(f'{path}:2: {problem}')}$"):
            read(path)


def test_what_looks_like_it_and_is_right_is_read(tmp_path):
    said = "\N{REPLACEMENT CHARACTER} \N{GRINNING FACE} [" + "[" * 200
    label: list = [1e308]
    for _ in range(98):
        label = [label]
    path = write(tmp_path / "p.jsonl", {"prompt": said, "label": label})
    path.write_bytes(
        path.read_bytes() + json.dumps({"prompt": said, "label": 1}, ensure_ascii=False).encode() + b"\r\n"
    )
    escaped, plain = read_prompts(path)
    assert [message["content"] for message in (*escaped.messages, *plain.messages)] == [said, said]
    assert escaped.label == label


def test_values_may_be_a_hundred_deep_in_each_other_and_no_deeper(tmp_path):
    for depth, right in ((100, True), (101, False)):
        # The line itself and its metadata are two.
        inner = "[" * (depth - 2) + "]" * (depth - 2)
        path = write(tmp_path / f"{depth}.jsonl", f'{{"prompt": "q", "label": 1, "metadata": {{"a": {inner}}}}}')
        if right:
            assert len(read_prompts(path)) == 1
        else:
            with pytest.raises(ValueError, match="nested more than 100 deep"):
                read_prompts(path)
    wide = write(tmp_path / "wide.jsonl", {"prompt": "q", "label": [[]] * 200})
    assert len(read_prompts(wide)[0].label) == 200


def test_twenty_broken_lines_are_all_shown_and_one_stands_alone(tmp_path):
    for count in (1, 20, 21):
        with pytest.raises(ValueError, match="unknown key k") as caught:
            read_prompts(write(tmp_path / "p.jsonl", *({"k" * number: 1} for number in range(1, count + 1))))
        lines = str(caught.value).splitlines()
        assert len(lines) == {1: 1, 20: 21, 21: 22}[count]
        assert (lines[-1] == "and 1 more") is (count == 21)


def test_a_problem_that_many_lines_share_is_said_once_with_their_number_and_the_first(tmp_path):
    rows = [{"prompt": "q", "label": 1}, {"label": 1}, *[{"prompt": "q", "label": 1, "note": 1}] * 30]
    path = write(tmp_path / "p.jsonl", *rows)
    with pytest.raises(ValueError, match=r"^31 broken lines:\n") as caught:
        read_prompts(path)
    _, other, shared = str(caught.value).splitlines()
    assert other.startswith(f"{path}:2: exactly one of")
    assert shared.startswith(f"{path}:3: unknown key note; ")
    assert shared.endswith(" (so in 30 lines, of which this is the first)")


def test_problems_that_differ_in_numbers_alone_are_one_cause():
    rows = [f"shop.jsonl:{line}: {200 + line} tokens leave no room to answer" for line in range(1, 21)]
    said = str(BrokenRows(rows))
    assert said.splitlines() == [
        "20 broken lines:",
        "shop.jsonl:1: 201 tokens leave no room to answer (so in 20 lines, of which this is the first)",
    ]
    assert str(BrokenRows(rows[:3])).splitlines() == ["3 broken lines:", *rows[:3]]


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("math.csv", "prompt,label\nq,1\nr,2\n", "not JSON: this is a file .csv"),
        ("math.json", '[\n  {"prompt": "q", "label": 1}\n]\n', "this is a JSON array over several lines"),
    ],
)
def test_a_file_of_another_format_is_named_once_with_what_can_be_read(tmp_path, name, text, kind):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=r"\.jsonl \(also \.jsonl\.gz\)") as caught:
        read_prompts(tmp_path / name)
    assert str(caught.value).startswith(f"{tmp_path / name}:1: {kind}. What can be read is a file .parquet")
    assert "\n" not in str(caught.value)


def test_a_file_of_the_other_kind_is_called_what_it_is_and_said_once(tmp_path):
    question, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    conversations = write(tmp_path / "sft.jsonl", *[{"messages": [question, answer]}] * 30)
    with pytest.raises(ValueError, match=r"sft\.jsonl:1: this is a conversation file.*\Z"):
        read_prompts(conversations)
    for line in ({"prompt": "q", "label": 1}, {"messages": [question], "label": 1}):
        prompts = write(tmp_path / "train.jsonl", *[line] * 30)
        with pytest.raises(ValueError, match=r"train\.jsonl:1: this is a prompt file.*\Z"):
            read_conversations(prompts)


def test_one_line_of_the_other_kind_among_good_ones_is_a_broken_line(tmp_path):
    conversation = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    path = write(tmp_path / "p.jsonl", {"prompt": "q", "label": 1}, conversation, "{")
    with pytest.raises(ValueError, match="2 broken lines"):
        read_prompts(path)
