"""A template that ends an answer with none of the model's stop tokens is refused before a run, with what to set."""

import json
from pathlib import Path

import pytest
from slimrl_tools.toy.toy_tokenizer import build_tokenizer
from test_left_out import template
from typer.testing import CliRunner

from slimrl.agent.sandbox.pool import SandboxPool
from slimrl.cli import app
from slimrl.config.load import load_recipe
from slimrl.config.problems import RecipeError
from slimrl.rollout.task.dialogue import load_chat_format, load_dialogues

RECIPES = Path(__file__).parents[2] / "recipes"
TINY = RECIPES / "tiny_moe" / "gspo_calculator.yaml"
TOKENIZER = build_tokenizer()
END, OTHER = TOKENIZER.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])


def folder_of(tmp_path: Path, text: str) -> Path:
    """A model whose configuration names another token than its template writes, as Qwen3-Base."""
    TOKENIZER.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(text)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "eos_token_id": OTHER}))
    return tmp_path


@pytest.mark.parametrize("command", ["train", "sft"])
def test_the_token_that_the_template_writes_is_named_and_may_be_set(tmp_path, command):
    recipe = TINY if command == "train" else TINY.with_name("sft.yaml")
    given = [f"model.path={folder_of(tmp_path, template())}"]
    problem = (
        rf"ends an answer with none of the tokens that end a turn, '<\|endoftext\|>' \({OTHER}\), but with "
        rf"'<\|im_end\|>'\. Set agent\.stop_token_ids: \[{END}, {OTHER}\]"
    )
    with pytest.raises(RecipeError, match=problem):
        load_chat_format(load_recipe(recipe, given, command))
    chat = load_chat_format(load_recipe(recipe, [*given, f"agent.stop_token_ids=[{END},{OTHER}]"], command))
    assert chat.answer_ends == {END}


def test_a_run_refuses_it_as_inspect_chat_does(tmp_path):
    given = [f"model.path={folder_of(tmp_path, template())}", "agent.tools=[]"]
    loaded = load_recipe(TINY, given, "train")
    with pytest.raises(RecipeError, match="ends an answer with none of the tokens"):
        load_dialogues(loaded, SandboxPool(loaded.recipe.agent.sandbox))
    result = CliRunner().invoke(app, ["inspect-chat", str(TINY), *given])
    assert result.exit_code == 2
    assert "ends an answer with none of the tokens" in result.output


def test_a_template_that_ends_answers_with_no_token_at_all_needs_another(tmp_path):
    text = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    with pytest.raises(RecipeError, match=r"none of the tokens .*; name another template in model\.chat_template"):
        load_chat_format(load_recipe(TINY, [f"model.path={folder_of(tmp_path, text)}"], "train"))
