"""Rules across the settings of a recipe, the model's config.json and the files that the recipe names.

Each rule is a pure function that yields (key, what is wrong). All of them run, and one error lists every violation.
They apply to what load_recipe returns, before any process starts.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from slimrl.config.hf_config import read_hf_config
from slimrl.config.keys import flatten
from slimrl.config.load import LoadedRecipe, is_needed, trains
from slimrl.config.model_rules import model_violations
from slimrl.config.problems import Problem
from slimrl.config.schema import AlgorithmName, LrSchedule, Recipe, TransportName

Violation = tuple[str, str]
"""(dotted key, what is wrong with it)."""

_POSITIVE = "must be greater than 0"
_FROM_ONE = "must be at least 1"
_FROM_ZERO = "must not be negative"
_FRACTION = "must lie between 0 and 1"

BOUNDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        [
            "steps",
            "trainer.num_ranks",
            "trainer.threads_per_rank",
            "trainer.parallel.tensor",
            "trainer.parallel.pipeline",
            "trainer.parallel.expert",
            "trainer.parallel.expert_tensor",
            "trainer.parallel.context",
            "trainer.max_tokens_per_rank",
            "trainer.updates_per_rollout",
            "trainer.logprob_chunk_tokens",
            "trainer.max_skipped_steps",
            "rollout.num_engines",
            "rollout.engine_tensor",
            "rollout.engine_expert",
            "rollout.threads_per_engine",
            "rollout.prompts_per_step",
            "rollout.samples_per_prompt",
            "rollout.max_concurrency",
            "rollout.sampling.max_new_tokens",
            "rollout.eval_sampling.max_new_tokens",
            "rollout.max_turns",
            "rollout.max_trajectory_tokens",
            "resync.bucket_bytes",
            "resync.sampled_tensors",
            "resync.keep",
            "resync.full_every",
            "sft.batch_conversations",
            "sft.max_tokens",
            "sft.summary_every_steps",
            "checkpoint.keep",
        ],
        (lambda value: value >= 1, _FROM_ONE),
    ),
    **dict.fromkeys(
        [
            "trainer.optimizer.lr",
            "trainer.optimizer.eps",
            "trainer.startup_timeout_s",
            "trainer.timeout_s",
            "algorithm.clip_low",
            "algorithm.clip_high",
            "algorithm.max_logprob_mismatch",
            "rollout.request_timeout_s",
            "rollout.tool_timeout_s",
            "rollout.trajectory_timeout_s",
            "rollout.startup_timeout_s",
            "resync.timeout_s",
        ],
        (lambda value: value > 0, _POSITIVE),
    ),
    **dict.fromkeys(
        [
            "seed",
            "trainer.optimizer.warmup_steps",
            "trainer.optimizer.min_lr",
            "trainer.optimizer.weight_decay",
            "trainer.optimizer.clip_grad",
            "rollout.sampling.temperature",
            "rollout.eval_sampling.temperature",
            "eval.every_steps",
            "checkpoint.every_steps",
            "rollout.max_replacements",
            "tracking.trajectories_per_step",
        ],
        (lambda value: value >= 0, _FROM_ZERO),
    ),
    "agent.max_result_chars": (lambda value: value >= 16, "must be at least 16"),
    "rollout.max_failed_fraction": (lambda value: 0 <= value <= 1, _FRACTION),
    **dict.fromkeys(
        ["trainer.optimizer.beta1", "trainer.optimizer.beta2"],
        (lambda value: 0 <= value < 1, "must be at least 0 and below 1"),
    ),
    **dict.fromkeys(
        ["rollout.sampling.top_p", "rollout.eval_sampling.top_p"],
        (lambda value: 0 < value <= 1, "must be greater than 0 and at most 1"),
    ),
    **dict.fromkeys(
        ["rollout.sampling.top_k", "rollout.eval_sampling.top_k"],
        (lambda value: value == -1 or value >= 1, "must be at least 1, or -1 for off"),
    ),
}
"""Range of each number that has one."""

DIVISORS = ("trainer.parallel.", "trainer.num_ranks", "rollout.engine_")
"""Sizes that the rules below divide by; while one of them is below 1, those rules say nothing sensible."""

MODULE_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def bound_violations(recipe: Recipe) -> Iterator[Violation]:
    """Numbers outside their range, and names that cannot be a folder, a metric or an import path."""
    values = dict(flatten(recipe))
    for key, (holds, rule) in BOUNDS.items():
        value = values[key]
        if isinstance(value, int | float) and not holds(value):
            yield key, f"{value}: {rule}."
    if not FILE_NAME.fullmatch(recipe.run.name):
        yield "run.name", f"{recipe.run.name!r} is no folder name; use letters, digits, '.', '_' and '-'."
    for name in recipe.data.eval:
        if not FILE_NAME.fullmatch(name):
            yield f"data.eval.{name}", f"{name!r} is no name of a set; use letters, digits, '.', '_' and '-'."
    for name in ("reward.function", "reward.group_filters", "agent.tools"):
        paths = values[name] if isinstance(values[name], list) else [values[name]]
        for path in paths:
            if not MODULE_FUNCTION.fullmatch(path) and path != "???":
                yield name, f"{path!r} is no import path; write module:function."


def layout_violations(recipe: Recipe) -> Iterator[Violation]:
    """Parallel sizes against the number of ranks and against each other."""
    parallel, ranks = recipe.trainer.parallel, recipe.trainer.num_ranks
    dense = parallel.tensor * parallel.pipeline * parallel.context
    if ranks % dense:
        yield (
            "trainer.num_ranks",
            f"{ranks} is not a multiple of tensor {parallel.tensor} x pipeline {parallel.pipeline} x context "
            f"{parallel.context} = {dense}.",
        )
    expert = parallel.expert * parallel.expert_tensor * parallel.pipeline
    if ranks % expert:
        yield (
            "trainer.parallel.expert",
            f"expert {parallel.expert} x expert_tensor {parallel.expert_tensor} x pipeline {parallel.pipeline} = "
            f"{expert} does not divide trainer.num_ranks {ranks}.",
        )
    if recipe.trainer.megatron.get("moe_token_dispatcher_type") == "allgather" and parallel.expert > 1:
        yield (
            "trainer.megatron.moe_token_dispatcher_type",
            "allgather needs equally many tokens on every expert-parallel rank, and packed micro-batches differ in "
            "length. Use alltoall.",
        )
    if parallel.sequence and parallel.tensor == 1:
        yield "trainer.parallel.sequence", "sequence parallelism needs trainer.parallel.tensor above 1."
    if parallel.virtual_pipeline is not None:
        if parallel.pipeline == 1:
            yield "trainer.parallel.virtual_pipeline", "needs trainer.parallel.pipeline above 1."
        if parallel.virtual_pipeline < 2:
            yield "trainer.parallel.virtual_pipeline", f"{parallel.virtual_pipeline}: use 2 or more, or null."


def padded_tokens(tokens: int, recipe: Recipe) -> int:
    """Tokens that one sequence takes up in a packed micro-batch, padded for tensor and context parallelism."""
    parallel = recipe.trainer.parallel
    alignment = parallel.tensor * (2 * parallel.context if parallel.context > 1 else 1)
    return -(-tokens // alignment) * alignment


def _warmup_violation(recipe: Recipe, updates: int) -> Iterator[Violation]:
    warmup, schedule = recipe.trainer.optimizer.warmup_steps, recipe.trainer.optimizer.schedule
    if schedule is not LrSchedule.constant and warmup >= updates:
        yield (
            "trainer.optimizer.warmup_steps",
            f"{warmup} updates of warm-up leave none of the {updates} updates of the run for the {schedule.value} "
            "schedule.",
        )


def _budget_violation(recipe: Recipe, key: str, tokens: int) -> Iterator[Violation]:
    trainer = recipe.trainer
    budget, needed = trainer.max_tokens_per_rank * trainer.parallel.context, padded_tokens(tokens, recipe)
    if budget < needed:
        least = -(-needed // trainer.parallel.context)
        yield (
            "trainer.max_tokens_per_rank",
            f"{trainer.max_tokens_per_rank} x context {trainer.parallel.context} = {budget} tokens cannot hold one "
            f"sequence of {key} {tokens} (padded {needed}). Use {least} or more.",
        )


def batch_violations(recipe: Recipe) -> Iterator[Violation]:
    """Groups, updates, the token budget and the schedule of `slimrl train`."""
    rollout, updates = recipe.rollout, recipe.trainer.updates_per_rollout
    if rollout.samples_per_prompt == 1:
        rule = recipe.algorithm.advantage.value
        yield "rollout.samples_per_prompt", f"1: {rule} advantages compare samples of one prompt. Use 2 or more."
    if updates > 0 and rollout.prompts_per_step % updates:
        yield (
            "rollout.prompts_per_step",
            f"{rollout.prompts_per_step} groups do not divide into trainer.updates_per_rollout {updates} equal shares.",
        )
    if rollout.sampling.temperature == 0:
        yield "rollout.sampling.temperature", "0 is greedy: every sample of a group would be the same."
    yield from _budget_violation(recipe, "rollout.max_trajectory_tokens", rollout.max_trajectory_tokens)
    yield from _warmup_violation(recipe, recipe.steps * updates)


def rollout_violations(recipe: Recipe) -> Iterator[Violation]:
    """Engine sizes, deadlines, lengths and the reach of the transport."""
    rollout = recipe.rollout
    if rollout.engine_tensor % rollout.engine_expert:
        yield (
            "rollout.engine_expert",
            f"{rollout.engine_expert} does not divide rollout.engine_tensor {rollout.engine_tensor}.",
        )
    for name in ("sampling", "eval_sampling"):
        new = getattr(rollout, name).max_new_tokens
        if new >= rollout.max_trajectory_tokens:
            yield (
                f"rollout.{name}.max_new_tokens",
                f"{new} leaves no room for a prompt in rollout.max_trajectory_tokens {rollout.max_trajectory_tokens}.",
            )
    for name in ("request_timeout_s", "tool_timeout_s"):
        if getattr(rollout, name) > rollout.trajectory_timeout_s:
            yield (
                f"rollout.{name}",
                f"{getattr(rollout, name)} is longer than rollout.trajectory_timeout_s {rollout.trajectory_timeout_s}.",
            )
    if recipe.resync.transport is TransportName.ipc and rollout.sglang.get("nnodes", 1) > 1:
        yield "resync.transport", "ipc reaches engines on the trainer's own node only. Use collective."
    if recipe.resync.transport is TransportName.delta and not recipe.resync.local_dir:
        yield "resync.local_dir", "delta needs a folder on the own disk of each node, with room for the model."
    if rollout.colocated and recipe.resync.transport is TransportName.collective:
        yield (
            "rollout.colocated",
            "collective needs devices of the engines' own. Use resync.transport ipc, or colocated false.",
        )


def sft_violations(recipe: Recipe) -> Iterator[Violation]:
    """The token budget and the schedule of `slimrl sft`."""
    yield from _warmup_violation(recipe, recipe.steps)
    yield from _budget_violation(recipe, "sft.max_tokens", recipe.sft.max_tokens)


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
    if command == "eval" and not recipe.data.eval:
        yield "data.eval", "names no evaluation set."
    if command == "train" and recipe.eval.every_steps and not recipe.data.eval:
        yield "eval.every_steps", f"{recipe.eval.every_steps}, but data.eval names no evaluation set."


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
    if trains(command):
        violations += layout_violations(recipe)
    if command in ("train", "train --trajectories"):
        violations += batch_violations(recipe)
        warnings += recipe_warnings(recipe)
    if command == "sft":
        violations += sft_violations(recipe)
    elif command != "export":
        violations += rollout_violations(recipe)
    if hf_config is not None:
        violations += model_violations(recipe, hf_config, command)
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
    located = [replace(problem, where=loaded.provenance.get(problem.key, loaded.path)) for problem in problems]
    return [
        replace(problem, where=f"{loaded.path} ({problem.where})") if problem.where == "default" else problem
        for problem in located
    ]
