"""`slimrl-tools prepare reasoning-gym` with the real library."""

import json
import re
from pathlib import Path

import pytest
from slimrl_tools.cli import app
from slimrl_tools.prepare.reasoning_gym import prepare_tasks
from typer.testing import CliRunner

from slimrl.config.load import load_recipe
from slimrl.data.mixture import Mixture
from slimrl.data.prompts import read_prompts

reasoning_gym = pytest.importorskip("reasoning_gym")

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny_moe" / "gspo_calculator.yaml"


def prepare(tasks: str, out: Path, *options: str):
    return CliRunner().invoke(app, ["prepare", "reasoning-gym", tasks, str(out), *options])


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def texts(file: Path) -> set[str]:
    return {line["prompt"] for line in lines(file)}


def test_each_task_gets_files_of_different_questions(tmp_path):
    done = prepare("gcd,letter_counting", tmp_path, "--num", "30", "--heldout", "10", "--seed", "3")
    assert done.exit_code == 0, done.output
    for task in ("gcd", "letter_counting"):
        train, heldout = tmp_path / task / "train.jsonl", tmp_path / task / "heldout.jsonl"
        assert [len(texts(file)) for file in (train, heldout)] == [30, 10]
        assert not texts(train) & texts(heldout)
        assert f"{train}: 30 questions; {heldout}: 10\n" in done.output
        for prompt in read_prompts(train):
            assert prompt.metadata["task"] == task
            entry = prompt.metadata["entry"]
            assert (prompt.messages[0]["content"], prompt.label) == (entry["question"], entry["answer"])
            assert reasoning_gym.get_score_answer_fn(task)(answer=prompt.label, entry=entry) == 1


@pytest.mark.parametrize("difficulty", ["1", "0,1"])
def test_the_lines_for_a_recipe_train_on_each_file_alike_and_evaluate_on_each(difficulty, tmp_path):
    done = prepare("gcd,lcm", tmp_path, "--num", "12", "--heldout", "4", "--difficulty", difficulty)
    printed = done.output.partition("For a recipe:")[2]
    reward = 'reward: {function: "slimrl.rewards.reasoning_gym:ReasoningGym"}\nagent: {tools: []}\n'
    (tmp_path / "recipe.yaml").write_text(f"extends: {RECIPE}\n{reward}{printed}")
    data = load_recipe(tmp_path / "recipe.yaml", [], command="train").recipe.data
    endings = [f"_{level}" for level in (0, 1)] if difficulty == "0,1" else [""]
    names = [f"{task}{ending}" for task in ("gcd", "lcm") for ending in endings]
    assert list(data.eval) == ["heldout", *names]  # the first is the extended recipe's
    assert list(data.train_files) == ["train", *names[1:]]
    assert set(data.weights.values()) == {1}
    files = {name: read_prompts(Path(file)) for name, file in data.train_files.items()}
    taken = Mixture(files, data.weights, seed=0, shuffle=True).take(12 * len(names))
    assert {prompt.source for prompt in taken} == {prompt.source for prompts in files.values() for prompt in prompts}
    heldout = {prompt.messages[0]["content"] for name in names for prompt in read_prompts(Path(data.eval[name]))}
    assert not heldout & {prompt.messages[0]["content"] for prompt in taken}


def test_the_seed_decides_what_is_written(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        prepare_tasks("gcd", tmp_path / name, num=20, heldout=5, seed=seed)
    first, same, other = ((tmp_path / name / "gcd" / "train.jsonl").read_bytes() for name in "abc")
    assert first == same
    assert first != other


def test_a_small_task_is_written_whole_and_split_in_the_wanted_proportion(tmp_path):
    options = ("--difficulty", "max_terms=2,max_digits=1", "--num", "300", "--heldout", "100")
    done = prepare("chain_sum", tmp_path, *options)
    # Two numbers from 0 to 9, added or subtracted.
    expected = {f"{a} {sign} {b}" for a in range(10) for b in range(10) for sign in "+-"}
    train, heldout = (lines(tmp_path / "chain_sum" / f"{name}.jsonl") for name in ("train", "heldout"))
    found = [line["metadata"]["entry"]["metadata"]["expression"] for line in train + heldout]
    assert (len(train), len(heldout)) == (150, 50)
    assert sorted(found) == sorted(expected)
    assert "only 200 of 400 wanted" in done.output


def test_a_question_is_in_the_files_of_one_level_alone(tmp_path):
    done = prepare("chain_sum", tmp_path, "--difficulty", "0,1,2", "--num", "150", "--heldout", "40")
    assert done.exit_code == 0, done.output
    files = [tmp_path / "chain_sum" / f"{name}_{level}.jsonl" for level in range(3) for name in ("train", "heldout")]
    assert sorted(files) == sorted((tmp_path / "chain_sum").iterdir())
    sizes = [len(texts(file)) for file in files]
    assert len(set().union(*map(texts, files))) == sum(sizes)
    most = [max(line["metadata"]["entry"]["metadata"]["num_terms"] for line in lines(file)) for file in files]
    assert most == [2, 2, 3, 3, 4, 4]


def test_settings_hold_for_their_task(tmp_path):
    difficulty = "gcd.min_value=2,gcd.max_value=12,chain_sum.max_digits=1,1,chain_sum.allow_negation=true"
    done = prepare("gcd,chain_sum", tmp_path, "--difficulty", difficulty, "--num", "20", "--heldout", "5")
    assert done.exit_code == 0, done.output
    values = [line["metadata"]["entry"]["metadata"] for line in lines(tmp_path / "gcd" / "train.jsonl")]
    assert max(number for value in values for number in value["numbers"]) <= 12
    sums = [
        line["metadata"]["entry"]["metadata"]["expression"] for line in lines(tmp_path / "chain_sum" / "train.jsonl")
    ]
    assert all(len(number.strip("-")) <= 1 for text in sums for number in text.split() if number not in "+-")
    assert any("-" in number and len(number) > 1 for text in sums for number in text.split())


@pytest.mark.parametrize(
    ("tasks", "options", "problem"),
    [
        ("chain_sums", (), "chain_sums: no such task; known are ab, acre, "),
        ("chain_sums", (), "Did you mean chain_sum?"),
        ("gcd,gcd", (), "gcd is named twice"),
        ("composite", (), "composite: mixes other tasks"),
        ("game_of_life_halting", (), "takes every answer as right"),
        ("gcd", ("--difficulty", "max_vlue=3"), "gcd has no max_vlue; it has min_numbers, max_numbers, "),
        ("gcd", ("--difficulty", "max_vlue=3"), "Did you mean max_value?"),
        ("gcd", ("--difficulty", "max_value=big"), "gcd.max_value: 'big': Input should be a valid integer"),
        ("gcd", ("--difficulty", "max_value=0"), "gcd refuses max_value=0: "),
        ("gcd", ("--difficulty", "9"), "gcd has no level 9; its levels are 0 to 3"),
        ("acre", ("--difficulty", "0"), "acre has no level 0; it has no levels"),
        ("gcd", ("--difficulty", "1,0"), "not in ascending order"),
        ("gcd", ("--difficulty", "hard"), "'hard' is neither a level such as 2 nor NAME=VALUE"),
        ("gcd", ("--difficulty", "lcm.max_value=3"), "lcm is none of the tasks"),
        ("gcd", ("--difficulty", "max_value=3,max_value=4"), "max_value has two values"),
        ("gcd", ("--difficulty", "seed=3"), "gcd has no seed"),
        ("arc_agi", ("--difficulty", "board_format_opts=x"), "which cannot be set here"),
    ],
)  # fmt: skip
def test_what_cannot_be_prepared_is_refused_by_its_name(tasks, options, problem, tmp_path):
    done = prepare(tasks, tmp_path / "out", *options)
    assert done.exit_code == 2
    assert problem in done.output
    assert not (tmp_path / "out").exists()


def test_a_folder_is_not_overwritten_and_options_of_tasks_go_with_no_file(tmp_path):
    (tmp_path / "gcd").mkdir()
    assert "exists; it is not overwritten" in prepare("gcd", tmp_path).output
    done = CliRunner().invoke(
        app, ["prepare", "gsm8k", "in.jsonl", str(tmp_path / "o.jsonl"), "--num", "3", "--seed", "1"]
    )
    assert (done.exit_code, "--num, --seed: only for reasoning-gym, and not for gsm8k" in done.output) == (2, True)


def test_entries_that_json_does_not_keep_are_left_out_and_counted(tmp_path):
    # The library gives some entries a Fraction, and some an integral that its scorer does not take as right.
    for task, num, heldout, seed in (("gsm_symbolic", 60, 10, "0"), ("intermediate_integration", 12, 3, "3")):
        options = ("--num", str(num), "--heldout", str(heldout), "--seed", seed)
        done = prepare(task, tmp_path, *options)
        assert done.exit_code == 0, done.output
        assert int(re.search(r"; left out: (\d+) that JSON does not keep", done.output)[1]) > 0
        assert len(texts(tmp_path / task / "train.jsonl")) == num
        for line in lines(tmp_path / task / "train.jsonl"):
            assert reasoning_gym.get_score_answer_fn(task)(answer=line["label"], entry=line["metadata"]["entry"]) == 1
    assert "left out" not in prepare("gcd", tmp_path, "--num", "20", "--heldout", "5").output


def test_a_task_of_which_json_keeps_no_entry_is_refused_and_the_others_are_not_written(tmp_path, monkeypatch):
    real = reasoning_gym.create_dataset

    def create(task, **arguments):
        entries = list(real(task, **arguments))
        return [{**entry, "answer": f"{entry['answer']}?"} for entry in entries] if task == "rearc" else entries

    monkeypatch.setattr(reasoning_gym, "create_dataset", create)
    with pytest.raises(ValueError, match=r"^rearc: 0 .* left out, .* does not earn 1 when read from JSON\)"):
        prepare_tasks("gcd,rearc", tmp_path, num=2, heldout=1, seed=0)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(
        reasoning_gym, "create_dataset",
        lambda task, *, size, **_: [{"question": "?", "answer": "1", "metadata": {"a": {1}}}] * size,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"^gcd: 0 .*cannot be written as JSON: Object of type set"):
        prepare_tasks("gcd", tmp_path, num=1, heldout=1, seed=0)


def test_when_writing_a_task_fails_none_is_written(tmp_path, monkeypatch):
    real = Path.open

    def full(path, *args, **kwargs):
        if path.name == "heldout.jsonl" and "lcm" in str(path):
            raise OSError(28, "No space left on device")
        return real(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(OSError, match="No space left"):
        prepare_tasks("gcd,lcm", tmp_path, num=3, heldout=2, seed=0)
    assert not list(tmp_path.iterdir())


def test_a_task_with_one_question_has_none_to_hold_out(tmp_path, monkeypatch):
    entry = {"question": "1 + 1?", "answer": "2", "metadata": {}}
    monkeypatch.setattr(reasoning_gym, "create_dataset", lambda task, *, size, **_: [entry] * size)
    with pytest.raises(ValueError, match="gcd: 1 different questions, and so none to hold out"):
        prepare_tasks("gcd", tmp_path, num=3, heldout=2, seed=0)
    assert not list(tmp_path.iterdir())
