"""A recipe's task, resolved before anything starts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from slimrl.agent.dialogue import Dialogue
from slimrl.agent.roles.player import refuse_unknown_players
from slimrl.agent.sandbox.pool import SandboxPool
from slimrl.agent.tool_environment import first_messages
from slimrl.algorithms.advantages import load_advantage
from slimrl.algorithms.losses import load_loss
from slimrl.base.rows import BrokenRows
from slimrl.config.import_path import resolve
from slimrl.config.load import LoadedRecipe, is_needed
from slimrl.config.problem_collector import ProblemCollector
from slimrl.config.problems import RecipeError
from slimrl.config.schema.algorithm import AdvantageName
from slimrl.config.schema.recipe import Recipe
from slimrl.data.prompt import Prompt
from slimrl.data.prompts import read_prompts
from slimrl.data.trajectory import Trajectory
from slimrl.rewards.loading import Rewards, Supplies, load_rewards, refuse_unjudged, refuse_unknown_names
from slimrl.rollout.task.episodes import EpisodeCode, load_episode_code
from slimrl.rollout.task.sandbox import check_command_sandbox, check_sandbox

GroupFilter = Callable[[list[Trajectory]], bool]
"""Given the trajectories of one group, returns whether to train on them."""


@dataclass(frozen=True, kw_only=True)
class Task(EpisodeCode):
    rewards: Rewards
    group_filters: list[GroupFilter]
    sandbox: SandboxPool
    """Sandboxes for the tools and rewards that ask for them. Its owner closes them: the stage that runs the
    episodes."""
    train: dict[str, list[Prompt]]
    """Training prompts by the name of their file; empty if the command does not train"""
    eval_sets: dict[str, list[Prompt]]
    notes: list[str] = field(default_factory=list)
    """Sentences on the prompts that are left out of each file, if `data.max_prompt_tokens` says so"""
    num_left_out: int = 0
    """Number of prompts left out of the training files"""


def load_task(loaded: LoadedRecipe, *, train: bool, evaluate: bool, here: bool = True) -> Task:
    """Resolve functions and tools, and read the data of a recipe's task.

    Args:
        here: the episodes will run on this machine, which therefore needs the sandbox that they ask for.

    Raises:
        RecipeError: all problems at once: import paths, tools, the chat template, broken lines of data, prompts
            without room for an answer, a sandbox that does not run.
    """
    recipe = loaded.recipe
    data, collector = recipe.data, ProblemCollector(loaded)
    sandbox = SandboxPool(recipe.agent.sandbox)
    code = collector.get("agent", lambda: load_episode_code(loaded, sandbox))
    rewards = load_rewards(recipe.reward, collector.get, Supplies({SandboxPool: sandbox}))
    checks = (rewards, () if code is None else code.roles)
    values: dict[str, Any] = {
        "rewards": rewards,
        "group_filters": collector.get("reward.group_filters", lambda: list(map(resolve, recipe.reward.group_filters))),
        "sandbox": sandbox,
        "train": {
            name: collector.get(data.train_key(name), partial(_read_training, name, Path(path), recipe, *checks))
            for name, path in (data.train_files.items() if train else ())
        },
        "eval_sets": {
            name: collector.get(f"data.eval.{name}", partial(_read, Path(path), data.keys_of_eval, recipe, *checks))
            for name, path in (data.eval.items() if evaluate else ())
        },
    }
    if is_needed("algorithm", loaded.command):
        collector.get("algorithm.loss", lambda: load_loss(recipe.algorithm.loss))
        if recipe.algorithm.advantage != AdvantageName.given:
            collector.get("algorithm.advantage", lambda: load_advantage(recipe.algorithm.advantage))
    if here and not collector.problems:
        collector.get("agent.sandbox.backend", lambda: check_sandbox(recipe))
        collector.get("agent.command_sandbox", lambda: check_command_sandbox(recipe.agent))
    if collector.problems:
        raise RecipeError(collector.problems)
    task = _without_long_prompts(Task(**vars(code), **values), recipe, collector)
    if collector.problems:
        raise RecipeError(collector.problems)
    return task


def _read(
    path: Path, keys: dict[str, str], recipe: Recipe, rewards: Rewards | None, roles: Sequence[str]
) -> list[Prompt]:
    """The prompts of a file.

    Args:
        rewards: None if they could not be loaded.
        roles: those that the environment's class says it has.

    Raises:
        ValueError: broken lines; rewards, players or roles that there are not; prompts that a reward refuses.
    """
    prompts = read_prompts(path, keys)
    if unknown := refuse_unknown_names(prompts, recipe.reward):
        raise BrokenRows(unknown)
    if unknown := refuse_unknown_players(prompts, recipe.agent, roles):
        raise BrokenRows(unknown)
    if rewards is not None and (unjudged := refuse_unjudged(prompts, rewards)):
        raise BrokenRows(unjudged)
    return prompts


def _read_training(
    name: str, path: Path, recipe: Recipe, rewards: Rewards | None, roles: Sequence[str]
) -> list[Prompt]:
    """The prompts of a file; ids of those of `data.more` begin with its name, since other files may have the same."""
    prompts = _read(path, recipe.data.keys, recipe, rewards, roles)
    return prompts if name == "train" else [replace(one, prompt_id=f"{name}/{one.prompt_id}") for one in prompts]


def _without_long_prompts(task: Task, recipe: Recipe, collector: ProblemCollector) -> Task:
    """The task without prompts that are longer than `data.max_prompt_tokens`, and what was left out; adds problems."""
    notes, dialogue = [], task.dialogues.of(task.tools.schemas)

    def fitting(sets: dict[str, list[Prompt]], key_of: Callable[[str], str]) -> dict[str, list[Prompt]]:
        kept = {}
        for name, prompts in sets.items():
            kept[name] = collector.get(key_of(name), partial(_fitting, prompts, dialogue, recipe)) or []
            limit, count = recipe.data.max_prompt_tokens, len(prompts) - len(kept[name])
            if limit is not None:
                notes.append(f"{key_of(name)}: left out {count} of {len(prompts)} prompts, longer than {limit} tokens")
        return kept

    train = fitting(task.train, recipe.data.train_key)
    eval_sets = fitting(task.eval_sets, "data.eval.{}".format)
    num_left_out = sum(map(len, task.train.values())) - sum(map(len, train.values()))
    return replace(task, train=train, eval_sets=eval_sets, notes=notes, num_left_out=num_left_out)


def _fitting(prompts: list[Prompt], dialogue: Dialogue, recipe: Recipe) -> list[Prompt]:
    """The prompts that are not longer than `data.max_prompt_tokens`.

    Raises:
        ValueError: lists prompts that the chat template refuses, or without room for an answer; or none is left.
    """
    whole, longest = recipe.rollout.max_trajectory_tokens, recipe.data.max_prompt_tokens
    broken, kept = [], []
    for prompt in prompts:
        try:
            messages = first_messages(prompt, recipe.agent.system_prompt)
            count = len(dialogue.chat.prompt(messages, dialogue.schemas, whole=True).tokens)
        except ValueError as error:
            broken.append(f"{prompt.source}: {error}")
            continue
        if longest is not None and count > longest:
            continue
        if count >= whole:
            said = f"{count} tokens leave no room to answer; rollout.max_trajectory_tokens is {whole}"
            broken.append(f"{prompt.source}: {said}")
        kept.append(prompt)
    if broken:
        raise BrokenRows(broken)
    if not kept:
        raise ValueError(f"all {len(prompts)} prompts are longer than data.max_prompt_tokens {longest}")
    return kept
