"""Checks of a start beyond a recipe's rules: folders, the model's files, the task, the run folder.

Submitting a job runs the same checks, for a later start on other machines.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from slimrl.checkpoints.digests import Seen, not_shown
from slimrl.config.load import LoadedRecipe, is_needed
from slimrl.config.problems import Problem, RecipeError
from slimrl.config.schema.recipe import Recipe
from slimrl.models.architecture import check_architecture, trained_architecture
from slimrl.models.hf_config import read_hf_config
from slimrl.observability.run_folder import RunFolder, check_start
from slimrl.rollout.task.task import load_task
from slimrl.runtime.checks.checkpoint_check import WholeCheckpoint, newest_checkpoint
from slimrl.runtime.checks.folder_check import folder_problems
from slimrl.runtime.checks.memory_check import memory_problems, shared_memory_problems
from slimrl.runtime.checks.model_check import model_problems
from slimrl.runtime.checks.teacher_check import teacher_problems
from slimrl.runtime.sft import read_examples
from slimrl.runtime.state import CheckpointFolder


def read_files[T](
    loaded: LoadedRecipe,
    problems: Sequence[Problem],
    read: Callable[[LoadedRecipe], T],
    *,
    shared_only: bool,
    devices: bool = True,
) -> T:
    """Check a recipe's folders and model, and return the result of `read`.

    Args:
        problems: already known ones.
        read: reads the rest of the recipe's files, such as its task.
        shared_only, devices: see `folder_problems` and `model_problems`; the run is on other machines, whose memory is
            not this one's, if `shared_only`.

    Raises:
        RecipeError: there are problems; it has all that can be found at once, the known ones included.
        ImportError: there are none, but a module that the recipe names imports a missing package.
    """
    problems = [*problems, *folder_problems(loaded, shared_only=shared_only)]
    if "model.path" not in {problem.key for problem in problems}:
        problems += model_problems(loaded, devices=devices)
    if not {"model.path", "teacher.path", "teacher.urls"} & {problem.key for problem in problems}:
        problems += teacher_problems(loaded, servers=devices)
    # Sizes that another problem makes impossible have no sum.
    if not problems and not shared_only:
        problems += [*memory_problems(loaded), *shared_memory_problems(loaded)]
    try:
        result = read(loaded)
    except RecipeError as error:
        known = {problem.key for problem in problems}
        found = [replace(p, message=loaded.environment.hide(p.message)) for p in error.problems if p.key not in known]
        raise RecipeError([*problems, *found]) from error
    except ImportError as error:
        if problems:
            raise RecipeError(problems) from error
        raise
    if problems:
        raise RecipeError(problems)
    return result


def check_later_start(loaded: LoadedRecipe) -> None:
    """Refuse a recipe whose shared files would stop a later start on other machines.

    Args:
        loaded: for `slimrl train` or `slimrl sft`; has passed every rule.

    Raises:
        RecipeError, ImportError: see `read_files`.
    """
    read: Callable[[LoadedRecipe], Any] = partial(load_task, train=True, evaluate=True, here=False)
    read_files(loaded, [], read_examples if loaded.command == "sft" else read, shared_only=True, devices=False)


def check_run(loaded: LoadedRecipe, *, resume: bool, overwrite: bool) -> None:
    """Refuse a run folder that `open_run` would refuse now, and a checkpoint that cannot be continued.

    Compares only the sizes of the checkpoint's files.

    Raises:
        ValueError: see `check_run_folder`, `resume_point` and `check_critic`.
    """
    recipe = loaded.recipe
    run = RunFolder(Path(recipe.run.dir) / recipe.run.name)
    check_start(run, resume=resume, overwrite=overwrite)
    if resume:
        found = resume_point(run, recipe, contents=False)
        if found is not None and is_needed("critic", loaded.command):
            check_critic(found.path, recipe)


def resume_point(
    folder: RunFolder, recipe: Recipe, *, contents: bool, seen: Seen = not_shown
) -> WholeCheckpoint | None:
    """The newest checkpoint of a run, or None; `contents` and `seen` as for `check_checkpoint`.

    Raises:
        ValueError: the checkpoint is damaged, of another model, or of a run that is complete.
    """
    found = newest_checkpoint(CheckpointFolder(folder.checkpoints), contents=contents, seen=seen)
    if found is None:
        return None
    check_checkpoint_model(found.path, recipe)
    if found.state.step >= recipe.steps and folder.export.is_dir():
        raise ValueError(
            f"{folder.path} is complete: step {found.state.step} of {recipe.steps}, model in {folder.export}. "
            "Give a larger `steps` to continue it."
        )
    return found


def check_critic(checkpoint: Path, recipe: Recipe) -> None:
    """Raises ValueError if a run's checkpoint lacks the recipe's critic, or has one that would be dropped."""
    if recipe.has_critic != (checkpoint / "critic").is_dir():
        what = "has no critic, as its run had none" if recipe.has_critic else "has a critic, which would be dropped"
        raise ValueError(
            f"{checkpoint} {what}. Give that run's export as model.path of a new run, or use the algorithm that it had."
        )


def check_checkpoint_model(checkpoint: Path, recipe: Recipe) -> None:
    """Raises ValueError if a run's checkpoint is of another model than the recipe's, or has other adapters."""
    hf_config = read_hf_config(Path(recipe.model.path))
    check_architecture(checkpoint / "trainer", trained_architecture(hf_config, recipe.trainer.lora))
