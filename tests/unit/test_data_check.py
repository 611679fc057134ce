"""`slimrl config check --data`: what it says of data files is what a start would say, and how much they hold."""

import json
import re
from pathlib import Path

import pytest
from slimrl_tools.toy.toy_configs import ToySize, toy_config
from slimrl_tools.toy.toy_tokenizer import build_tokenizer
from typer.testing import CliRunner

from slimrl.cli import app
from slimrl.config.load import load_recipe
from slimrl.config.problems import RecipeError
from slimrl.rollout.task.task import load_task
from slimrl.runtime.sft import read_examples

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes" / "tiny_moe"
USER, ANSWER = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "\\boxed{2}"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer and a config, without weights."""
    tokenizer, path = build_tokenizer(), tmp_path_factory.mktemp("model")
    tokenizer.save_pretrained(path)
    config = toy_config("qwen3_moe", ToySize()) | {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    (path / "config.json").write_text(json.dumps(config))
    return path


def write(path: Path, *lines: dict) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def check(recipe: str, settings: list[str], *options: str):
    return CliRunner().invoke(app, ["config", "check", str(RECIPES / recipe), *settings, *options])


def prompts(*labels: object) -> list[dict]:
    return [{"messages": [USER], "label": label} for label in labels]


def test_the_prompts_of_each_file_that_a_command_reads_are_counted(model, tmp_path):
    train, more = write(tmp_path / "t.jsonl", *prompts(2, 2, 2)), write(tmp_path / "m.jsonl", *prompts(2))
    heldout = write(tmp_path / "h.jsonl", *prompts(2, 2))
    settings = [f"model.path={model}", f"data.train={train}", f"data.more.m={more}", f"data.eval.heldout={heldout}"]
    of_train = [f"data.train: 3 prompts of {train}", f"data.more.m: 1 prompts of {more}"]
    of_eval = [f"data.eval.heldout: 2 prompts of {heldout}"]
    for command, lines in {"train": of_train + of_eval, "rollout": of_train, "eval": of_eval}.items():
        result = check("gspo_calculator.yaml", settings, "--data", "--command", command)
        assert result.exit_code == 0, result.output
        assert [line for line in result.output.splitlines() if line.startswith("data.")] == lines
    assert "prompts of" not in check("gspo_calculator.yaml", settings).output


def test_prompts_that_are_left_out_for_their_length_are_counted_apart(model, tmp_path):
    long = {"messages": [{"role": "user", "content": "1" * 300}], "label": 2}
    train = write(tmp_path / "t.jsonl", long, *prompts(2, 2))
    settings = [f"model.path={model}", f"data.train={train}", "data.max_prompt_tokens=250"]
    result = check("gspo_calculator.yaml", settings, "--data", "--command", "rollout")
    said = [f"data.train: 2 prompts of {train}", "data.train: left out 1 of 3 prompts, longer than 250 tokens"]
    assert [line for line in result.output.splitlines() if line.startswith("data.")] == said, result.output


def test_conversations_are_counted(model, tmp_path):
    train = write(tmp_path / "c.jsonl", *([{"messages": [USER, ANSWER]}] * 3))
    result = check("sft.yaml", [f"model.path={model}", f"data.train={train}"], "--data")
    assert result.exit_code == 0, result.output
    assert f"data.train: 3 examples of {train}\n" in result.output


def test_what_a_start_refuses_of_the_data_is_said_in_its_words(model, tmp_path):
    train = write(tmp_path / "t.jsonl", *prompts(2, None), {"prompt": "1+1?"}, {"prompt": "1+1?", "lable": 3})
    heldout = write(tmp_path / "h.jsonl", *prompts("None"))
    conversations = write(tmp_path / "c.jsonl", {"messages": [USER]})
    settings = [f"model.path={model}", f"data.train={train}", f"data.eval.heldout={heldout}"]
    with pytest.raises(RecipeError) as of_train:
        load_task(load_recipe(RECIPES / "gspo_calculator.yaml", settings, "train"), train=True, evaluate=True)
    of_sft = [f"model.path={model}", f"data.train={conversations}"]
    with pytest.raises(RecipeError) as of_examples:
        read_examples(load_recipe(RECIPES / "sft.yaml", of_sft, "sft"))
    for recipe, given, error in [("gspo_calculator.yaml", settings, of_train), ("sft.yaml", of_sft, of_examples)]:
        refused = check(recipe, given, "--data")
        assert (refused.exit_code, refused.output) == (1, f"{error.value}\n")
        assert check(recipe, given).exit_code == 0
    assert f"{train}:3: `label` is missing" in str(of_train.value)
    assert f"{heldout}:1: " in str(of_train.value)


def test_without_the_model_s_tokenizer_it_is_refused_by_its_key(tmp_path):
    train = write(tmp_path / "t.jsonl", *prompts(2))
    settings = [f"model.path={tmp_path / 'absent'}", f"data.train={train}", f"data.eval.heldout={train}"]
    refused = check("gspo_calculator.yaml", settings, "--data")
    assert refused.exit_code == 1
    assert "model.path: " in refused.output


def test_the_snippet_of_the_page_of_rewards_pays_the_right_answer_alone(capsys):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "rewards.md").read_text(), re.DOTALL)
    (snippet,) = [block for block in blocks if "print(" in block]
    exec(snippet, {})
    exec(snippet.replace("{408}", "{409}"), {})
    assert capsys.readouterr().out == "1.0\n0.0\n"
