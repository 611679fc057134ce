"""Rules of the sections `data` and `eval`, as far as they need no file."""

from collections.abc import Iterator

from slimrl.config.load import is_needed
from slimrl.config.problems import Violation, suggestion
from slimrl.config.schema.credit import RefillMode
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.rollout import RolloutMode

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
        yield from _curriculum_violations(recipe, command)
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


def _curriculum_violations(recipe: Recipe, command: str) -> Iterator[Violation]:
    key, levels = "data.curriculum.levels", recipe.data.curriculum.levels
    files = recipe.data.train_files
    if levels and command == "sft":
        yield key, "slimrl sft has no rewards from which a success rate comes. Use data.weights."
    if levels and recipe.algorithm.dynamic_sampling.refill is RefillMode.value:
        yield key, "algorithm.dynamic_sampling.refill: value draws prompts of all files. Use order."
    curriculum = recipe.data.curriculum
    if levels and curriculum.lower_at is not None and curriculum.lower_at >= curriculum.raise_at:
        message = f"{curriculum.lower_at} is not less than raise_at, {curriculum.raise_at}; a level would never stay."
        yield "data.curriculum.lower_at", message
    used: dict[str, str] = {}
    for ladder, names in levels.items():
        if len(names) < 2:
            yield f"{key}.{ladder}", "needs two files or more, the easiest first."
        for name in names:
            if name not in files:
                known = ", ".join(files)
                yield f"{key}.{ladder}", f"{name} is no training file; there are {known}.{suggestion(name, files)}"
            elif name in used:
                yield f"{key}.{ladder}", f"{name} is in {used[name]} already."
            used.setdefault(name, ladder)


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


def eval_violations(recipe: Recipe, command: str) -> Iterator[Violation]:
    """Evaluations without anything to evaluate on, without engines, of equal samples, pass@k of more than there are."""
    if command == "eval" and not recipe.data.eval:
        yield "data.eval", "names no evaluation set."
    if command == "train" and recipe.eval.every_steps and not recipe.data.eval:
        yield "eval.every_steps", f"{recipe.eval.every_steps}, but data.eval names no evaluation set. Use 0."
    if command == "train" and recipe.eval.engines:
        yield from _engine_violations(recipe)
    if command in ("train", "eval") and recipe.data.eval:
        yield from _sample_violations(recipe)


def _engine_violations(recipe: Recipe) -> Iterator[Violation]:
    count, rollout = recipe.eval.engines, recipe.rollout
    if not recipe.data.eval:
        yield "eval.engines", f"{count}, but data.eval names no evaluation set. Use 0."
    elif not recipe.eval.every_steps and not recipe.eval.at_start:
        yield (
            "eval.engines",
            f"{count}, but eval.every_steps is 0 and eval.at_start false, and the evaluation after the last step has "
            "all engines. Use 0, or set one of them.",
        )
    if rollout.mode is RolloutMode.sync:
        yield (
            "eval.engines",
            f"{count}, but with rollout.mode sync all engines wait for the trainer. Use 0, or rollout.mode async or "
            "one_step_off.",
        )
    elif count >= rollout.num_engines:
        yield (
            "eval.engines",
            f"{count} of rollout.num_engines {rollout.num_engines} leave none for the rollouts. Use at most "
            f"{rollout.num_engines - 1}, or 0 to evaluate between two steps.",
        )


def _sample_violations(recipe: Recipe) -> Iterator[Violation]:
    samples, sampling = recipe.eval.samples_per_prompt, recipe.rollout.eval_sampling
    greedy = {"temperature": sampling.temperature == 0, "top_k": sampling.top_k == 1}
    for name, holds in greedy.items():
        if samples > 1 and holds:
            value = f"{getattr(sampling, name):g}"
            other = "a temperature such as 0.7" if name == "temperature" else "-1"
            yield (
                "eval.samples_per_prompt",
                f"{samples} samples of a prompt would all be the same, since rollout.eval_sampling.{name} is {value}. "
                f"Set that to {other}, or samples_per_prompt to 1.",
            )
    for k in recipe.eval.pass_at:
        if k > samples:
            yield (
                "eval.pass_at",
                f"pass@{k} needs {k} samples of each prompt, and eval.samples_per_prompt is {samples}. "
                "Raise that, or leave this k out.",
            )
