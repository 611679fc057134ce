"""What a start looks into beside a recipe's rules: folders, files of the model, the task, the folder of the run.

The same is done where a job is submitted that starts later, on other machines.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from slimrl.config.load import LoadedRecipe
from slimrl.config.problems import Problem, RecipeError
from slimrl.config.schema import Recipe
from slimrl.models.architecture import architecture_of, check_architecture
from slimrl.models.hf_config import read_hf_config
from slimrl.observability.run_folder import RunFolder, check_run_folder
from slimrl.runtime.checkpoint_check import WholeCheckpoint, newest_checkpoint
from slimrl.runtime.folder_check import folder_problems
from slimrl.runtime.model_check import model_problems
from slimrl.runtime.sft import read_examples
from slimrl.runtime.state import CheckpointFolder
from slimrl.runtime.task import load_task

T = TypeVar("T")


def read_files(
    loaded: LoadedRecipe,
    problems: Sequence[Problem],
    read: Callable[[LoadedRecipe], T],
    *,
    shared_only: bool,
    devices: bool = True,
) -> T:
    """What `read` makes of the files that a recipe names, when all of them have been looked into.

    Args:
        problems: of the recipe that are known already.
        read: the rest that the command needs of what the recipe names, such as its task.
        shared_only: leave out what lies on the own disk of each node.
        devices: refuse what needs devices that this machine does not have.

    Raises:
        RecipeError: it is refused, with all the reasons that can be seen at once, the known ones among them.
        ImportError: it is not, but a module that it names imports what is not here.
    """
    problems = [*problems, *folder_problems(loaded, shared_only=shared_only)]
    if "model.path" not in {problem.key for problem in problems}:
        problems += model_problems(loaded, devices=devices)
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
    """Refuse a recipe that a start on other machines would refuse for files that are shared with this one.

    Args:
        loaded: of `slimrl train` or `slimrl sft`, and let pass by every rule.

    Raises:
        RecipeError, ImportError: see `read_files`.
    """
    read: Callable[[LoadedRecipe], Any] = partial(load_task, train=True, evaluate=True)
    read_files(loaded, [], read_examples if loaded.command == "sft" else read, shared_only=True, devices=False)


def check_run(recipe: Recipe, *, resume: bool, overwrite: bool) -> None:
    """Refuse what `open_run` would refuse of the run's folder now, and a checkpoint that cannot be continued.

    Of the checkpoint's files it looks at the sizes alone.

    Raises:
        ValueError: see `check_run_folder` and `resume_point`.
    """
    run = RunFolder(Path(recipe.run.dir) / recipe.run.name)
    # A run that ended before its first step gives way to any other.
    if resume or not run.ended_early.is_file():
        check_run_folder(run, resume=resume, overwrite=overwrite)
    if resume:
        resume_point(run, recipe, contents=False)


def resume_point(folder: RunFolder, recipe: Recipe, *, contents: bool) -> WholeCheckpoint | None:
    """The newest checkpoint of a run; None where there is none yet.

    Args:
        contents: compare all that is in its files with what was written, which reads the whole checkpoint; without it
            their sizes.

    Raises:
        ValueError: the checkpoint is damaged, of another model, or of a run that is complete.
    """
    found = newest_checkpoint(CheckpointFolder(folder.checkpoints), contents=contents)
    if found is None:
        return None
    check_checkpoint_model(found.path, recipe)
    if found.state.step >= recipe.steps and folder.export.is_dir():
        raise ValueError(
            f"{folder.path} is complete: step {found.state.step} of {recipe.steps}, model in {folder.export}. "
            "Give a larger `steps` to continue it."
        )
    return found


def check_checkpoint_model(checkpoint: Path, recipe: Recipe) -> None:
    """Raises ValueError where a run's checkpoint is of another model than the recipe's."""
    check_architecture(checkpoint / "trainer", architecture_of(read_hf_config(Path(recipe.model.path))))
