"""Rules of the section `data`, as far as they need no file."""

from collections.abc import Iterator

from slimrl.config.load import is_needed
from slimrl.config.problems import Violation, suggestion
from slimrl.config.schema.recipe import Recipe

PROMPT_KEYS = ("prompt", "messages", "label", "id", "metadata")
"""Our names of what a row of a prompt file has."""

CONVERSATION_KEYS = ("messages", "tools", "id", "metadata")
"""Our names of what a row of a conversation file has."""


def data_violations(recipe: Recipe, command: str) -> Iterator[Violation]:
    """Names of columns that the command does not read, weights of other files, prompts as long as a trajectory."""
    names = CONVERSATION_KEYS if command == "sft" else PROMPT_KEYS
    data, evaluates = recipe.data, is_needed("data.eval", command)
    if is_needed("data.train", command) or (evaluates and not data.eval_keys):
        yield from _key_violations("data.keys", data.keys, names, command)
    if evaluates:
        yield from _key_violations("data.eval_keys", data.eval_keys, PROMPT_KEYS, command)
    if is_needed("data.weights", command):
        yield from _weight_violations(recipe)
    longest, whole = data.max_prompt_tokens, recipe.rollout.max_trajectory_tokens
    if command in ("train", "eval", "rollout") and longest is not None and longest >= whole:
        message = f"{longest} leaves no room to answer; rollout.max_trajectory_tokens is {whole}. Use less."
        yield "data.max_prompt_tokens", message


def _weight_violations(recipe: Recipe) -> Iterator[Violation]:
    files, weights = recipe.data.train_files, recipe.data.weights
    if "train" in recipe.data.more:
        yield "data.more.train", "`train` is the name of data.train. Use another."
    if not weights:
        return
    for name in sorted(weights.keys() - files.keys()):
        yield f"data.weights.{name}", f"data.more names no such file.{suggestion(name, files)}"
    for name in files.keys() - weights.keys():
        yield "data.weights", f"has no weight of {name}; give one to each of {', '.join(files)}."


def _key_violations(section: str, keys: dict[str, str], names: tuple[str, ...], command: str) -> Iterator[Violation]:
    for name in sorted(keys.keys() - set(names)):
        yield f"{section}.{name}", f"slimrl {command} reads {', '.join(names)}.{suggestion(name, names)}"
    if not keys:
        return
    if len(keys.keys() & {"prompt", "messages"} & set(names)) != 1:
        what = "messages" if command == "sft" else "exactly one of prompt and messages"
        yield section, f"must name the column of {what}."
    if command != "sft" and "label" not in keys:
        yield section, "must name the column of label, with which the reward compares."
