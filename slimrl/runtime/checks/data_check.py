"""`slimrl config check --data`: reads a recipe's data files as a start does, and starts no run."""

from collections.abc import Sized
from dataclasses import replace

from slimrl.config.load import LoadedRecipe
from slimrl.config.problems import RecipeError
from slimrl.rollout.task.task import load_task
from slimrl.runtime.checks.fetched_model import with_tokenizer
from slimrl.runtime.sft import read_examples


def data_lines(loaded: LoadedRecipe) -> list[str]:
    """How many prompts or examples each file has, and how many are left out.

    Args:
        loaded: for `slimrl train`, `sft`, `eval` or `rollout`; has passed every rule.

    Raises:
        RecipeError: what `load_task` or `read_examples` finds, such as broken rows by file and line.
        ImportError: a module that the recipe names imports a missing package.
    """
    loaded = with_tokenizer(loaded)
    data, command = loaded.recipe.data, loaded.command
    try:
        if command == "sft":
            examples = read_examples(loaded)
            return [
                _line(data.train_key(name), found, "examples", data.train_files[name])
                for name, found in examples.items()
            ]
        task = load_task(loaded, train=command != "eval", evaluate=command != "rollout", here=False)
    except RecipeError as error:
        hide = loaded.environment.hide
        raise RecipeError([replace(one, message=hide(one.message)) for one in error.problems]) from error
    train = [
        _line(data.train_key(name), found, "prompts", data.train_files[name]) for name, found in task.train.items()
    ]
    held_out = [_line(f"data.eval.{name}", found, "prompts", data.eval[name]) for name, found in task.eval_sets.items()]
    return [*train, *held_out, *task.notes]


def _line(key: str, found: Sized, noun: str, path: str) -> str:
    return f"{key}: {len(found)} {noun} of {path}"
