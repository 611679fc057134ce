"""`slimrl-tools prepare` on small files in the layouts in which the data sets are published."""

import csv
import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from slimrl_tools.cli import app
from typer.testing import CliRunner

from slimrl.data.prompt import Prompt
from slimrl.data.prompts import read_prompts
from slimrl.data.trajectory import Status, Trajectory
from slimrl.rewards.math import boxed_equivalent

DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\nRemember to put your answer on its "
    'own line after "Answer:".'
)

SLIME = DAPO.replace("$Answer (without quotes)", "\\boxed{{$Answer}}")

GSM8K_ROWS = [
    {"question": "Natalia sold 48/2 clips.\nHow many?", "answer": "48/2 = <<48/2=24>>24 clips.\n#### 72"},
    {"question": "How many dollars?", "answer": "Much.\n#### 1,234,567"},
    {"question": "How cold?", "answer": "Cold.\n#### -5"},
    {"question": "What share?", "answer": "Half.\n#### 0.5"},
]
AIME_2024 = {"ID": "2024-I-1", "Problem": "Find it.", "Solution": "long", "Answer": 204}
SETS = {
    "gsm8k": (GSM8K_ROWS, ["72", "1234567", "-5", "0.5"]),
    "aime": (
        [
            AIME_2024,
            {"id": 61, "problem": "p", "solution": "s", "answer": "033", "url": "u", "year": "2024"},
            {"id": 1, "problem": "angle", "answer": "336^\\circ"},
            {"problem": "boxed", "solution": "so \\boxed{1} and then \\boxed{25}."},
            {"ID": "1983-1", "Year": 1983, "Question": "w?", "Answer": "60"},
        ],
        ["204", "33", "336", "25", "60"],
    ),
    "math": (
        [
            {
                "problem": "p",
                "level": "Level 5",
                "solution": "First $\\boxed{1}$, so $\\boxed{\\frac{1}{2}}$.",
                "type": "A",
            },
            {"problem": "without braces", "solution": "It is $\\boxed 2$."},
            {"problem": "another box", "solution": "It is $\\fbox{x+1}$."},
            {"problem": "MATH-500", "solution": "so \\boxed{3}", "answer": "3", "unique_id": "test/1.json"},
        ],
        ["\\frac{1}{2}", "2", "x+1", "3"],
    ),
    "deepscaler": (
        [
            {"problem": "Half of $x$?", "answer": "\\frac{1}{2}", "solution": "s"},
            {"problem": "Root?", "answer": "-\\frac{2}{3}", "solution": ""},
            {"problem": "How many?", "answer": "26", "solution": "s"},
        ],
        ["\\frac{1}{2}", "-\\frac{2}{3}", "26"],
    ),
    "dapo-math": (
        [
            {
                "data_source": "math_dapo",
                "prompt": [{"content": DAPO.format(f"Problem {i}."), "role": "user"}],
                "ability": "MATH",
                "reward_model": {"ground_truth": str(i), "style": "rule-lighteval/MATH_v2"},
                "extra_info": {"index": f"9a9b6eb4-{i}"},
            }
            for i in (34, 113)
        ],
        ["34", "113"],
    ),
}


def write(path: Path, rows: list[dict]) -> Path:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=2))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            table = csv.DictWriter(file, rows[0])
            table.writeheader()
            table.writerows(rows)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prepare(name: str, file: Path, out: Path):
    return CliRunner().invoke(app, ["prepare", name, str(file), str(out)])


def boxed(prompt: Prompt, answer: str) -> float:
    messages = [*prompt.messages, {"role": "assistant", "content": f"It is \\boxed{{{answer}}}."}]
    return boxed_equivalent(
        Trajectory(trajectory_id="t", group_id="g", segments=[], messages=messages, status=Status.completed), prompt
    )


@pytest.mark.parametrize("ending", [".parquet", ".jsonl", ".json"])
@pytest.mark.parametrize("name", SETS)
def test_a_published_file_becomes_prompts_whose_labels_the_reward_accepts(name, ending, tmp_path):
    rows, answers = SETS[name]
    if ending == ".parquet" and name == "aime":
        rows, answers = rows[1:2], answers[1:2]
    out = tmp_path / "out.jsonl"
    result = prepare(name, write(tmp_path / f"rows{ending}", rows), out)
    assert result.exit_code == 0, result.output
    assert f"{out}: {len(rows)} problems of {len(rows)} rows; left out: 0 repeated, 0 of problems" in result.output
    prompts = read_prompts(out)
    assert [prompt.label for prompt in prompts] == answers
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True), 1):
        assert prompt.metadata == {"data_set": name, "row": number}
        assert boxed(prompt, answer) == 1.0
        assert boxed(prompt, "9999999") == 0.0


def test_the_texts_are_the_bare_problems(tmp_path):
    texts = {
        "gsm8k": "Natalia sold 48/2 clips.\nHow many?",
        "dapo-math": "Problem 34.",
        "aime": "Find it.",
        "deepscaler": "Half of $x$?",
    }
    for name, text in texts.items():
        out = tmp_path / f"{name}.jsonl"
        prepare(name, write(tmp_path / "rows.jsonl", SETS[name][0]), out)
        assert read_prompts(out)[0].messages == [{"role": "user", "content": text}]


def test_the_problems_of_slime_s_file_are_those_of_the_published_one(tmp_path):
    message = {"role": "user", "step_loss_mask": 1}
    rows = [
        {"prompt": [message | {"content": SLIME.format(f"Problem {answer}.")}], "label": answer}
        for answer in ("34", "113")
    ]
    assert "of the form Answer: \\boxed{$Answer} where" in rows[0]["prompt"][0]["content"]
    for name, given in {"slime": rows, "published": SETS["dapo-math"][0]}.items():
        result = prepare("dapo-math", write(tmp_path / f"{name}_in.jsonl", given), tmp_path / f"{name}.jsonl")
        assert result.exit_code == 0, result.output
    assert (tmp_path / "slime.jsonl").read_text() == (tmp_path / "published.jsonl").read_text()


def test_an_instruction_in_the_middle_of_a_problem_stays(tmp_path):
    problem = "What does this ask for: " + SLIME.format("x")
    write(tmp_path / "in.jsonl", [{"prompt": problem, "label": "34"}])
    assert prepare("dapo-math", tmp_path / "in.jsonl", tmp_path / "o.jsonl").exit_code == 0
    (prompt,) = read_prompts(tmp_path / "o.jsonl")
    assert prompt.messages[0]["content"].startswith("What does this ask for: Solve the following")


@pytest.mark.parametrize("ending", [".jsonl", ".json"])
def test_a_compressed_file_gives_what_the_plain_one_gives(ending, tmp_path):
    plain = write(tmp_path / f"rows{ending}", GSM8K_ROWS)
    packed = tmp_path / f"rows{ending}.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    for file in (plain, packed):
        assert prepare("gsm8k", file, tmp_path / f"{file.name}.out.jsonl").exit_code == 0
    written = [(tmp_path / f"{file.name}.out.jsonl").read_text() for file in (plain, packed)]
    assert written[0] == written[1]
    assert len(written[0].splitlines()) == len(GSM8K_ROWS)


@pytest.mark.parametrize("ending", [".jsonl", ".json"])
def test_a_broken_gzip_file_is_refused_by_its_name(ending, tmp_path):
    whole = gzip.compress(write(tmp_path / f"rows{ending}", GSM8K_ROWS).read_bytes())
    wrong_sum = whole[:-8] + bytes(4) + whole[-4:]
    for content in (whole[:-9], whole[:20], wrong_sum, b"plain text\n", whole[:10] + b"\xff" * 9 + whole[19:]):
        packed = tmp_path / f"broken{ending}.gz"
        packed.write_bytes(content)
        result = prepare("gsm8k", packed, tmp_path / "o.jsonl")
        assert result.exit_code == 2
        assert f"{packed}: not a whole gzip file: " in result.stderr
        assert not (tmp_path / "o.jsonl").exists()


def test_other_compressed_files_are_refused_by_their_ending(tmp_path):
    (tmp_path / "rows.parquet.gz").write_bytes(gzip.compress(b""))
    assert "ends in none of .parquet, " in prepare("gsm8k", tmp_path / "rows.parquet.gz", tmp_path / "o.jsonl").stderr


def test_a_table_of_contests_is_read_from_csv(tmp_path):
    rows = [{"ID": "1983-1", "Year": 1983, "Question": 'Of "x",\ny?', "Answer": "060", "Part": ""}]
    assert prepare("aime", write(tmp_path / "a.csv", rows), tmp_path / "o.jsonl").exit_code == 0
    (prompt,) = read_prompts(tmp_path / "o.jsonl")
    assert (prompt.messages[0]["content"], prompt.label) == ('Of "x",\ny?', "60")


def test_a_problem_that_comes_many_times_is_written_once_and_one_with_two_answers_not_at_all(tmp_path):
    rows = [dict(row) for row in SETS["dapo-math"][0] * 100]
    other = {**rows[0], "prompt": [{"role": "user", "content": DAPO.format("Which?")}]}
    rows += [{**other, "reward_model": {"ground_truth": answer}} for answer in ("1", "2", "1")]
    out = tmp_path / "o.jsonl"
    result = prepare("dapo-math", write(tmp_path / "d.parquet", rows), out)
    assert "2 problems of 203 rows; left out: 198 repeated, 3 of problems with different answers" in result.output
    assert [prompt.label for prompt in read_prompts(out)] == ["34", "113"]


@pytest.mark.parametrize(
    ("name", "row", "problem"),
    [
        ("gsm8k", {"question": "q", "answer": "It is 72."}, "answer ends with 'It is 72.', not with a number"),
        ("gsm8k", {"question": "q", "answer": "#### about 72"}, "not with a number after ####"),
        ("gsm8k", {"question": " ", "answer": "#### 72"}, "question is ' '"),
        ("gsm8k", {"problem": "q", "answer": "#### 72"}, "no question; the row has problem, answer"),
        ("dapo-math", {"prompt": [{"role": "user", "content": "q"}]}, "no label or reward_model; the row has prompt"),
        ("dapo-math", {"prompt": "q", "reward_model": "34"}, "reward_model is no object"),
        ("dapo-math", {"prompt": "q", "reward_model": {"style": "rule"}}, "no ground_truth; the row has style"),
        ("dapo-math", {"prompt": [], "reward_model": {"ground_truth": "1"}}, "prompt is not one user message"),
        ("dapo-math", {"prompt": DAPO.format(""), "reward_model": {"ground_truth": "1"}}, "holds no problem"),
        ("aime", {"problem": "p", "answer": "1000"}, "'1000' is no integer from 0 to 999"),
        ("aime", {"problem": "p", "answer": "-3"}, "'-3' is no integer"),
        ("aime", {"problem": "p", "solution": "so 25"}, "no answer, and the solution has none in a box"),
        ("aime", {"answer": "3"}, "no problem or question"),
        ("math", {"problem": "p", "solution": "so 25"}, "the solution has no answer in a box"),
        ("math", {"problem": "p", "solution": "so \\boxed{ }"}, "the solution has no answer in a box"),
        ("math", {"solution": "\\boxed{1}"}, "no problem; the row has solution"),
        ("deepscaler", {"problem": "p", "answer": ["1"]}, "answer is ['1']"),
        ("deepscaler", {"problem": "p", "answer": None}, "no answer; the row has problem, answer"),
    ],
)
def test_a_broken_row_is_refused_with_file_and_row_and_nothing_is_written(name, row, problem, tmp_path):
    good, out = SETS[name][0][0], tmp_path / "o.jsonl"
    file = write(tmp_path / "rows.jsonl", [good, row])
    result = prepare(name, file, out)
    assert result.exit_code == 2
    assert f"{file}:2: " in result.stderr
    assert problem in result.stderr
    assert not out.exists()


def test_what_cannot_be_prepared_is_refused(tmp_path):
    file, out = write(tmp_path / "rows.jsonl", GSM8K_ROWS), tmp_path / "o.jsonl"
    result = prepare("gms8k", file, out)
    assert (result.exit_code, "Did you mean gsm8k?" in result.stderr) == (2, True)
    out.write_text("mine")
    result = prepare("gsm8k", file, out)
    assert (result.exit_code, "exists; it is not overwritten" in result.stderr) == (2, True)
    assert out.read_text() == "mine"
    result = prepare("gsm8k", file, tmp_path / "o.parquet")
    assert (result.exit_code, "o.parquet: must end in .jsonl" in result.stderr) == (2, True)


def test_a_new_folder_is_made(tmp_path):
    out = tmp_path / "data" / "math" / "o.jsonl"
    assert prepare("gsm8k", write(tmp_path / "rows.jsonl", GSM8K_ROWS), out).exit_code == 0
    assert len(read_prompts(out)) == len(GSM8K_ROWS)
    for name, content in (("a.txt", b""), ("a.json", b"[1]"), ("a.json", b"[{"), ("a.csv", b"Answer\n\xff\n")):
        (tmp_path / name).write_bytes(content)
        result = prepare("aime", tmp_path / name, tmp_path / "new.jsonl")
        assert result.exit_code == 2
        assert str(tmp_path / name) in result.stderr
    assert "no such file" in prepare("aime", tmp_path / "none.csv", tmp_path / "new.jsonl").stderr
