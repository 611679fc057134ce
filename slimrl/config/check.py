"""All rules of a recipe: between its settings, against the model's config.json, and about the files that it names.

Each rule is a pure function that yields (key, message). All rules run on the result of load_recipe before any process
starts, and one error lists every violation.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slimrl.config.bounds import DIVISORS, bound_violations
from slimrl.config.data_rules import data_violations
from slimrl.config.environment import environment_violations
from slimrl.config.fp8_tiles import fp8_tile_violations, trainer_tile_warnings
from slimrl.config.fp8_training import fp8_violations
from slimrl.config.hf_config import num_experts, read_hf_config
from slimrl.config.hub import cached, hub_model
from slimrl.config.load import LoadedRecipe, is_needed, trains
from slimrl.config.model_rules import model_violations, model_warnings
from slimrl.config.problems import Problem, Violation
from slimrl.config.rollout_rules import (
    colocation_violations,
    colocation_warnings,
    kept_memory_warnings,
    rollout_violations,
    transport_warnings,
)
from slimrl.config.schema import AlgorithmName, Recipe
from slimrl.config.trainer_rules import (
    batch_violations,
    batch_warnings,
    layout_violations,
    megatron_violations,
    sft_violations,
    warmup_warnings,
)


def file_violations(recipe: Recipe, command: str) -> Iterator[Violation]:
    """Files of the recipe that do not exist; reads the file system."""
    for name, path in recipe.data.train_files.items():
        if is_needed("data.train", command) and not Path(path).is_file():
            yield recipe.data.train_key(name), f"{path}: no such file."
    for name, path in recipe.data.eval.items():
        if is_needed("data.eval", command) and not Path(path).is_file():
            yield f"data.eval.{name}", f"{path}: no such file."
    if recipe.model.chat_template and not Path(recipe.model.chat_template).is_file():
        yield "model.chat_template", f"{recipe.model.chat_template}: no such file."
    hub = hub_model(recipe.model.path)
    if hub is not None and cached(hub) is None:
        said = f"no such folder, and {hub.model_id} is not whole in the cache of the Hugging Face Hub."
        yield "model.path", f"{recipe.model.path}: {said} Run `hf download {hub.model_id}`."
    elif hub is None and not Path(recipe.model.path).is_dir():
        yield "model.path", f"{recipe.model.path}: no such folder."
    elif hub is None and not (Path(recipe.model.path) / "config.json").is_file():
        yield "model.path", f"{recipe.model.path} has no config.json; a Hugging Face checkpoint is expected."


def eval_violations(recipe: Recipe, command: str) -> Iterator[Violation]:
    """Evaluations without anything to evaluate on."""
    if command == "eval" and not recipe.data.eval:
        yield "data.eval", "names no evaluation set."
    if command == "train" and recipe.eval.every_steps and not recipe.data.eval:
        yield "eval.every_steps", f"{recipe.eval.every_steps}, but data.eval names no evaluation set. Use 0."


def recipe_warnings(recipe: Recipe) -> Iterator[Violation]:
    """Settings that are legal but probably not meant."""
    for name in ("clip_low", "clip_high"):
        value = getattr(recipe.algorithm, name)
        if recipe.algorithm.name is AlgorithmName.gspo and value > 1e-2:
            yield (
                f"algorithm.{name}",
                f"{value} is a range for per-token ratios; GSPO's sequence ratios move by about 1e-4 to 1e-3.",
            )


def check_recipe(recipe: Recipe, hf_config: dict[str, Any] | None, command: str) -> list[Problem]:
    """Every violation and warning of a recipe, from its values alone.

    Args:
        hf_config: the model's config.json, or None to leave out the rules that need it.
        command: rules for settings that this command does not read are left out.
    """
    violations = list(bound_violations(recipe))
    if any(key.startswith(DIVISORS) for key, _ in violations):
        return [Problem(key=key, message=message) for key, message in violations]
    warnings: list[Violation] = []
    experts = 0 if hf_config is None else num_experts(hf_config) or 1
    violations += [*eval_violations(recipe, command), *data_violations(recipe, command)]
    violations += environment_violations(recipe, trainer=trains(command), engines=command not in ("sft", "export"))
    if trains(command):
        violations += layout_violations(recipe, experts)
        violations += [*megatron_violations(recipe), *fp8_violations(recipe)]
    if command in ("train", "sft"):
        warnings += warmup_warnings(recipe, command)
    if command == "train":
        warnings += kept_memory_warnings(recipe)
    if command in ("train", "train --trajectories"):
        violations += batch_violations(recipe)
        warnings += [*recipe_warnings(recipe), *batch_warnings(recipe)]
    if command == "sft":
        violations += sft_violations(recipe)
    elif command != "export":
        violations += rollout_violations(recipe, experts)
        if trains(command):
            violations += colocation_violations(recipe)
            warnings += [*colocation_warnings(recipe), *transport_warnings(recipe)]
    if hf_config is not None:
        violations += model_violations(recipe, hf_config, command)
        if command not in ("sft", "export"):
            violations += fp8_tile_violations(recipe, hf_config)
        if trains(command):
            warnings += trainer_tile_warnings(recipe, hf_config)
        warnings += model_warnings(recipe, hf_config, command)
    return [Problem(key=key, message=message) for key, message in violations] + [
        Problem(key=key, message=message, warning=True) for key, message in warnings
    ]


def check_loaded(loaded: LoadedRecipe) -> list[Problem]:
    """Problems and warnings of every rule, files and model included, each with the place where its key was set."""
    recipe, hf_config = loaded.recipe, None
    problems = [Problem(key=key, message=message) for key, message in file_violations(recipe, loaded.command)]
    if not any(problem.key == "model.path" for problem in problems):
        try:
            hf_config = read_hf_config(Path(recipe.model.path))
        except (ValueError, OSError) as error:
            problems.append(Problem(key="model.path", message=f"{error}."))
    problems += check_recipe(recipe, hf_config, loaded.command)
    return [loaded.problem(problem.key, problem.message, warning=problem.warning) for problem in problems]
