"""What a recipe says about its task, resolved before anything starts."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from slimrl.agent.episode import EpisodeRunner, first_messages
from slimrl.agent.parsers import Parser, make_parser
from slimrl.agent.tools import ToolBox
from slimrl.config.load import LoadedRecipe
from slimrl.config.problems import Problem, RecipeError
from slimrl.config.schema import Recipe
from slimrl.data.chat import ChatFormat
from slimrl.data.import_path import resolve
from slimrl.data.jsonl import summary
from slimrl.data.prompts import read_prompts
from slimrl.data.protocols import Engine
from slimrl.data.trajectory import Prompt, Trajectory
from slimrl.rewards.scoring import RewardFunction

GroupFilter = Callable[[list[Trajectory]], bool]
"""Gets the trajectories of one group and says whether to train on them."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """The resolved task of a run."""

    chat: ChatFormat
    tools: ToolBox
    parser: Parser
    reward: RewardFunction
    group_filters: list[GroupFilter]
    train: list[Prompt]
    """Empty where the command does not train."""
    eval_sets: dict[str, list[Prompt]]

    def episode_runner(self, recipe: Recipe, engine: Engine) -> EpisodeRunner:
        return EpisodeRunner(
            engine=engine,
            chat=self.chat,
            tools=self.tools,
            parser=self.parser,
            rollout=recipe.rollout,
            system_prompt=recipe.agent.system_prompt,
            max_result_chars=recipe.agent.max_result_chars,
        )


def load_task(loaded: LoadedRecipe, *, train: bool, evaluate: bool) -> Task:
    """Reads and resolves everything that the recipe's task names.

    Raises:
        RecipeError: all problems at once: import paths, tools, data files with their broken lines, prompts that leave
            no room to answer.
    """
    recipe = loaded.recipe
    problems: list[Problem] = []

    def attempt(key: str, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except ValueError as error:
            problems.append(Problem(key=key, message=str(error), where=loaded.provenance.get(key, "")))
            return None

    values: dict[str, Any] = {
        "chat": attempt("model.path", lambda: load_chat_format(Path(recipe.model.path))),
        "tools": attempt("agent.tools", lambda: ToolBox.from_import_paths(recipe.agent.tools)),
        "parser": attempt("agent.parser", lambda: make_parser(recipe.agent.parser)),
        "reward": attempt("reward.function", lambda: resolve(recipe.reward.function)),
        "group_filters": attempt("reward.group_filters", lambda: [resolve(f) for f in recipe.reward.group_filters]),
        "train": attempt("data.train", lambda: read_prompts(Path(recipe.data.train))) if train else [],
        "eval_sets": {
            name: attempt(f"data.eval.{name}", partial(read_prompts, Path(path)))
            for name, path in (recipe.data.eval.items() if evaluate else ())
        },
    }
    if not problems:
        task = Task(**values)
        if recipe.rollout.stop_at_tool_call:
            attempt("agent.parser", partial(task.chat.token_id, task.parser.close_marker))
        sets = {"data.train": task.train} | {f"data.eval.{name}": prompts for name, prompts in task.eval_sets.items()}
        for key, prompts in sets.items():
            attempt(key, partial(_check_prompts, prompts, task, recipe))
    if problems:
        raise RecipeError(problems)
    return task


def _check_prompts(prompts: list[Prompt], task: Task, recipe: Recipe) -> None:
    """Raises ValueError for prompts that the chat template refuses, or after which nothing can be sampled; by line."""
    limit = recipe.rollout.max_trajectory_tokens
    broken = []
    for prompt in prompts:
        try:
            tokens = task.chat.prompt_tokens(first_messages(prompt, recipe.agent.system_prompt), task.tools.schemas)
        except ValueError as error:
            broken.append(f"{prompt.source}: {error}")
            continue
        if len(tokens) >= limit:
            said = f"{len(tokens)} tokens leave no room to answer; rollout.max_trajectory_tokens is {limit}"
            broken.append(f"{prompt.source}: {said}")
    if broken:
        raise ValueError(summary(broken))


def load_chat_format(model_path: Path) -> ChatFormat:
    """Raises ValueError where the folder has no usable tokenizer."""
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(model_path, local_files_only=True)
    except OSError as error:
        raise ValueError(f"no tokenizer in {model_path}: {error}") from error
    return ChatFormat(tokenizer)
