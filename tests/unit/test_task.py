"""The task of a recipe: prompts that no episode could begin with are refused by their lines."""

import json
import re
from functools import partial
from pathlib import Path

import pytest
from slimrl_tools.toy_tokenizer import build_tokenizer

from slimrl.agent.parsers import ParsedTurn
from slimrl.config.load import LoadedRecipe, load_recipe
from slimrl.config.problems import RecipeError
from slimrl.runtime.sft import read_examples
from slimrl.runtime.task import load_task

RECIPES = Path(__file__).parents[2] / "recipes" / "tiny_moe"
USER, ANSWER = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}
SYSTEM = {"role": "system", "content": "Do."}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer whose chat template refuses the word `refuse`."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[-1].content == 'refuse' %}{{ raise_exception('this word') }}{% endif %}"
        + tokenizer.chat_template
    )
    path = tmp_path_factory.mktemp("model")
    tokenizer.save_pretrained(path)
    return path


def write(path: Path, *lines: dict) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def loaded(model: Path, train: Path, *overrides: str, command="train") -> LoadedRecipe:
    recipe = RECIPES / ("sft.yaml" if command == "sft" else "gspo_calculator.yaml")
    settings = [f"model.path={model}", f"data.train={train}", *overrides]
    return load_recipe(recipe, settings, command)


def num_tokens(model: Path, messages: list[dict], *overrides: str) -> int:
    """Of a prompt, with the recipe's tools and a system prompt of the recipe before it."""
    task = load_task(loaded(model, Path("none.jsonl"), *overrides), train=False, evaluate=False)
    return len(task.chat._tokenizer.apply_chat_template(
        messages, tools=task.tools.schemas, add_generation_prompt=True, return_dict=False
    ))  # fmt: skip


class WordsParser:
    """Closes a call with what is several tokens."""

    close_marker = "end of call"

    def parse(self, text: str) -> ParsedTurn:
        return ParsedTurn(content=text, calls=[])


def test_a_parser_whose_marker_is_several_tokens_is_refused_where_turns_stop_at_it(model, tmp_path):
    recipe = partial(loaded, model, write(tmp_path / "t.jsonl", {"messages": [USER], "label": 2}))
    parser = f"agent.parser={__name__}:WordsParser"
    load_task(recipe(parser, "rollout.stop_at_tool_call=false"), train=True, evaluate=False)
    with pytest.raises(RecipeError) as caught:
        load_task(recipe(parser), train=True, evaluate=False)
    (problem,) = caught.value.problems
    assert problem.key == "agent.parser"
    assert re.fullmatch(r"end of call is \d+ tokens .* must be one to stop at it", problem.message)


@pytest.mark.parametrize("system", [None, "Do."])
def test_a_prompt_that_leaves_no_room_to_answer_is_refused_by_its_line(model, tmp_path, system):
    long = {"role": "user", "content": "What is 1+1?"}
    train = write(tmp_path / "t.jsonl", {"messages": [USER], "label": 2}, {"messages": [long], "label": 2})
    heldout = write(tmp_path / "h.jsonl", {"messages": [long], "label": 2})
    before = [] if system is None else [SYSTEM]
    tokens = num_tokens(model, [*before, long])
    assert tokens > num_tokens(model, [*before, USER])
    settings = [f"data.eval.heldout={heldout}", f"agent.system_prompt={system or 'null'}"]

    fits = loaded(model, train, *settings, f"rollout.max_trajectory_tokens={tokens + 1}")
    assert len(load_task(fits, train=True, evaluate=True).train) == 2
    with pytest.raises(RecipeError) as caught:
        load_task(loaded(model, train, *settings, f"rollout.max_trajectory_tokens={tokens}"), train=True, evaluate=True)
    said = f"{tokens} tokens leave no room to answer; rollout.max_trajectory_tokens is {tokens}"
    assert [(problem.key, problem.message) for problem in caught.value.problems] == [
        ("data.train", f"{train}:2: {said}"),
        ("data.eval.heldout", f"{heldout}:1: {said}"),
    ]


def test_a_line_that_the_chat_template_refuses_is_named(model, tmp_path):
    refused = {"role": "user", "content": "refuse"}
    prompts = write(tmp_path / "p.jsonl", {"messages": [USER], "label": 2}, {"messages": [refused], "label": 2})
    with pytest.raises(RecipeError, match=r"p\.jsonl:2: the chat template refuses it: this word"):
        load_task(loaded(model, prompts), train=True, evaluate=False)
    answer = {"role": "assistant", "content": "refuse"}
    conversations = write(tmp_path / "c.jsonl", {"messages": [USER, ANSWER]}, {"messages": [USER, answer]})
    with pytest.raises(RecipeError, match=r"c\.jsonl:2: the chat template refuses it: this word"):
        read_examples(loaded(model, conversations, command="sft"))
