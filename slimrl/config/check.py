"""All rules of a recipe: across its settings, against the model's config.json, and about the files that it names.

Each rule is a pure function that yields (key, what is wrong). All of them run, and one error lists every violation.
They apply to what load_recipe returns, before any process starts.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slimrl.config.bounds import DIVISORS, bound_violations
from slimrl.config.fp8_tiles import fp8_tile_violations
from slimrl.config.hf_config import read_hf_config
from slimrl.config.load import LoadedRecipe, is_needed, trains
from slimrl.config.model_rules import model_violations, model_warnings, num_experts
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
    """Files that the recipe names and that are not there; reads the file system."""
    if is_needed("data.train", command) and not Path(recipe.data.train).is_file():
        yield "data.train", f"{recipe.data.train}: no such file."
    for name, path in recipe.data.eval.items():
        if is_needed("data.eval", command) and not Path(path).is_file():
            yield f"data.eval.{name}", f"{path}: no such file."
    if not Path(recipe.model.path).is_dir():
        yield "model.path", f"{recipe.model.path}: no such folder."
    elif not (Path(recipe.model.path) / "config.json").is_file():
        yield "model.path", f"{recipe.model.path} holds no config.json; a Hugging Face checkpoint is expected."


def eval_violations(recipe: Recipe, command: str) -> Iterator[Violation]:
    """Evaluations without anything to evaluate on."""
    if command == "eval" and not recipe.data.eval:
        yield "data.eval", "names no evaluation set."
    if command == "train" and recipe.eval.every_steps and not recipe.data.eval:
        yield "eval.every_steps", f"{recipe.eval.every_steps}, but data.eval names no evaluation set. Use 0."


def recipe_warnings(recipe: Recipe) -> Iterator[Violation]:
    """What runs, but is probably not meant."""
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
        recipe: as load_recipe returns it.
        hf_config: the model's config.json, or None to leave out the rules that need it.
        command: rules for settings that this command does not read are left out.
    """
    violations = list(bound_violations(recipe))
    if any(key.startswith(DIVISORS) for key, _ in violations):
        return [Problem(key=key, message=message) for key, message in violations]
    warnings: list[Violation] = []
    experts = 0 if hf_config is None else num_experts(hf_config) or 1
    violations += eval_violations(recipe, command)
    if trains(command):
        violations += layout_violations(recipe, experts)
        violations += megatron_violations(recipe)
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
        warnings += model_warnings(recipe, hf_config, command)
    return [Problem(key=key, message=message) for key, message in violations] + [
        Problem(key=key, message=message, warning=True) for key, message in warnings
    ]


def check_loaded(loaded: LoadedRecipe, hf_config: dict[str, Any] | None = None) -> list[Problem]:
    """Apply every rule, files and model included, to a loaded recipe.

    Args:
        hf_config: the model's config.json, for a command that needs none of the files that the recipe names.

    Returns:
        What is wrong and what is to be warned of; each problem says where its key was set.
    """
    recipe = loaded.recipe
    problems: list[Problem] = []
    if hf_config is None:
        problems += [Problem(key=key, message=message) for key, message in file_violations(recipe, loaded.command)]
    if hf_config is None and not any(problem.key == "model.path" for problem in problems):
        try:
            hf_config = read_hf_config(Path(recipe.model.path))
        except (ValueError, OSError) as error:
            problems.append(Problem(key="model.path", message=f"{error}."))
    problems += check_recipe(recipe, hf_config, loaded.command)
    return [loaded.problem(problem.key, problem.message, warning=problem.warning) for problem in problems]
