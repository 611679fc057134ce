"""All rules of a recipe: between its settings, against the model's config.json, and about the files that it names.

Each rule is a pure function that yields (key, message). All rules run on the result of load_recipe before any process
starts, and one error lists every violation.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slimrl.config.agent_rules import agent_file_violations, agent_violations, agent_warnings, chat_violations
from slimrl.config.algorithm_rules import (
    algorithm_violations,
    algorithm_warnings,
    credit_violations,
    routing_violations,
    stop_violations,
)
from slimrl.config.async_rules import mode_violations, mode_warnings
from slimrl.config.critic import critic_recipe, critic_violations, of_critic
from slimrl.config.data_rules import data_violations, eval_violations
from slimrl.config.env_vars import environment_violations
from slimrl.config.fp8_tiles import fp8_tile_violations, trainer_tile_warnings
from slimrl.config.fp8_training import fp8_violations
from slimrl.config.hf_config import num_experts, read_hf_config
from slimrl.config.hub import why_no_model
from slimrl.config.load import LoadedRecipe, is_needed, trains
from slimrl.config.lora_rules import lora_model_violations, lora_model_warnings, lora_violations
from slimrl.config.model_rules import model_violations, model_warnings
from slimrl.config.past_versions import past_violations
from slimrl.config.problems import Problem, Violation
from slimrl.config.restart_rules import (
    RESTARTING,
    copy_violations,
    rewind_warnings,
    spare_violations,
    spare_warnings,
)
from slimrl.config.reward_rules import reward_violations
from slimrl.config.rollout_rules import (
    colocation_violations,
    colocation_warnings,
    kept_memory_warnings,
    rollout_violations,
    transport_warnings,
)
from slimrl.config.schema.recipe import Recipe
from slimrl.config.search_rules import search_violations
from slimrl.config.speculative_rules import draft_violations
from slimrl.config.teacher import teacher_model_violations, teacher_violations
from slimrl.config.tracking_rules import tracking_violations, tracking_warnings
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
        if is_needed("data.train", command) and not os.path.isfile(path):
            yield recipe.data.train_key(name), f"{path}: no such file."
    for name, path in recipe.data.eval.items():
        if is_needed("data.eval", command) and not os.path.isfile(path):
            yield f"data.eval.{name}", f"{path}: no such file."
    if recipe.model.chat_template and not os.path.isfile(recipe.model.chat_template):
        yield "model.chat_template", f"{recipe.model.chat_template}: no such file."
    if reason := why_no_model(recipe.model.path):
        yield "model.path", reason
    teacher = recipe.teacher.path
    if teacher and is_needed("teacher", command) and (reason := why_no_model(teacher)):
        yield "teacher.path", reason
    if is_needed("agent", command) and command != "sft":
        yield from agent_file_violations(recipe)


def check_recipe(
    recipe: Recipe, hf_config: dict[str, Any] | None, command: str, *, teacher_config: dict[str, Any] | None = None
) -> list[Problem]:
    """Every violation and warning of a recipe, from its values alone.

    Args:
        hf_config: the model's config.json, or None to leave out the rules that need it.
        command: rules for settings that this command does not read are left out.
        teacher_config: the teacher's config.json, or None to leave out the rules that need it.
    """
    violations: list[Violation] = []
    warnings: list[Violation] = []
    experts = 0 if hf_config is None else num_experts(hf_config) or 1
    violations += chat_violations(recipe.agent)
    violations += [*eval_violations(recipe, command), *data_violations(recipe, command)]
    violations += [*reward_violations(recipe, command), *tracking_violations(recipe, command)]
    teaches = is_needed("teacher", command)
    violations += environment_violations(
        recipe, trainer=trains(command), engines=command not in ("sft", "export"), teacher=teaches
    )
    if teaches:
        violations += teacher_violations(recipe)
        if teacher_config is not None:
            violations += teacher_model_violations(recipe, teacher_config, hf_config)
    if trains(command):
        violations += layout_violations(recipe, experts)
        violations += [*megatron_violations(recipe), *fp8_violations(recipe), *lora_violations(recipe, hf_config)]
        violations += routing_violations(recipe, None if hf_config is None else num_experts(hf_config), command)
    if command in RESTARTING:
        warnings += [*warmup_warnings(recipe, command), *spare_warnings(recipe), *rewind_warnings(recipe)]
        violations += [*copy_violations(recipe), *spare_violations(recipe, command)]
    if command in ("train", "train --trajectories", "sft"):
        violations += stop_violations(recipe, command)
    if command == "train":
        violations += [*draft_violations(recipe), *mode_violations(recipe), *past_violations(recipe, hf_config)]
        warnings += mode_warnings(recipe)
        warnings += kept_memory_warnings(recipe)
    if command in ("train", "train --trajectories"):
        violations += [*algorithm_violations(recipe), *batch_violations(recipe)]
        violations += critic_violations(recipe)
        warnings += [*algorithm_warnings(recipe), *batch_warnings(recipe)]
    if command in ("train", "train --trajectories", "rollout"):
        violations += credit_violations(recipe)
    if command == "sft":
        violations += sft_violations(recipe)
    elif command != "export":
        violations += [*rollout_violations(recipe, experts), *agent_violations(recipe)]
        violations += search_violations(recipe, command)
        warnings += agent_warnings(recipe)
        if trains(command):
            violations += colocation_violations(recipe)
            warnings += [*colocation_warnings(recipe), *transport_warnings(recipe)]
    if hf_config is not None:
        violations += model_violations(recipe, hf_config, command)
        violations += lora_model_violations(recipe, hf_config) if trains(command) else ()
        if command not in ("sft", "export"):
            violations += fp8_tile_violations(recipe, hf_config)
        if trains(command):
            warnings += [*trainer_tile_warnings(recipe, hf_config), *lora_model_warnings(recipe, hf_config)]
        warnings += model_warnings(recipe, hf_config, command)
    if recipe.has_critic and is_needed("critic", command):
        violations += of_critic(_trainer_rules(critic_recipe(recipe), hf_config, experts, command), known=violations)
    return [Problem(key=key, message=message) for key, message in violations] + [
        Problem(key=key, message=message, warning=True) for key, message in warnings
    ]


def _trainer_rules(critic: Recipe, hf_config: dict[str, Any] | None, experts: int, command: str) -> Iterator[Violation]:
    """Rules of the trainer that its critic's settings can break."""
    yield from layout_violations(critic, experts)
    yield from megatron_violations(critic)
    yield from fp8_violations(critic)
    yield from batch_violations(critic)
    yield from environment_violations(critic, trainer=True, engines=False)
    if hf_config is not None:
        yield from model_violations(critic, hf_config, command)


def check_loaded(loaded: LoadedRecipe) -> list[Problem]:
    """Problems and warnings of every rule, files and model included, each with the place where its key was set."""
    recipe, hf_config, teacher_config = loaded.recipe, None, None
    problems = [Problem(key=key, message=message) for key, message in file_violations(recipe, loaded.command)]
    if not any(problem.key == "model.path" for problem in problems):
        try:
            hf_config = read_hf_config(Path(recipe.model.path))
        except (ValueError, OSError) as error:
            problems.append(Problem(key="model.path", message=f"{error}."))
    served = recipe.teacher.path and is_needed("teacher", loaded.command)
    if served and not any(problem.key == "teacher.path" for problem in problems):
        try:
            teacher_config = read_hf_config(Path(recipe.teacher.path))
        except (ValueError, OSError) as error:
            problems.append(Problem(key="teacher.path", message=f"{error}."))
    problems += check_recipe(recipe, hf_config, loaded.command, teacher_config=teacher_config)
    problems += [
        Problem(key=key, message=message, warning=True) for key, message in tracking_warnings(recipe, loaded.command)
    ]
    return [loaded.problem(problem.key, problem.message, warning=problem.warning) for problem in problems]
