"""Models that the recipe names by their ids on the Hugging Face Hub, fetched before a start."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from slimrl.config.check import check_loaded
from slimrl.config.hub import CONFIG_FILES, SMALL_FILES, HubModel, cached, fetch, hub_model, with_model, with_teacher
from slimrl.config.load import LoadedRecipe, is_needed
from slimrl.config.problems import Problem, RecipeError
from slimrl.observability.progress import Progress

_PUT: dict[str, Callable[[LoadedRecipe, Path], LoadedRecipe]] = {
    "model.path": with_model,
    "teacher.path": with_teacher,
}
"""Key of a model -> function that puts a folder there."""


def fetch_model(loaded: LoadedRecipe, problems: Sequence[Problem], progress: Progress) -> LoadedRecipe:
    """The recipe with the folders of its model and its teacher, fetched if they are on the Hub.

    The weights are fetched when their config.json and the recipe have passed all rules.

    Args:
        problems: already known ones of the recipe.

    Raises:
        RecipeError: it has problems, or a model cannot be fetched.
    """
    on_hub = _on_hub(loaded)
    if not on_hub:
        return loaded
    revisions: dict[str, HubModel] = {}
    with_configs, key = loaded, ""
    try:
        for key, model in on_hub.items():
            with progress.stage(f"fetching {model.model_id}"):
                config = fetch(model, CONFIG_FILES)
            # The commit of that config, whatever is published meanwhile.
            revisions[key] = replace(model, revision=config.name)
            with_configs = _PUT[key](with_configs, config)
        refused = [*problems, *check_loaded(with_configs)]
        if all(problem.warning for problem in refused):
            for key, model in revisions.items():
                with progress.stage(f"fetching {model.model_id}"):
                    loaded = _PUT[key](loaded, fetch(model))
            return loaded
    except ValueError as error:
        raise RecipeError([*problems, loaded.problem(key, str(error).replace("model.path", key))]) from error
    raise RecipeError([problem for problem in refused if not problem.warning])


def with_tokenizer(loaded: LoadedRecipe) -> LoadedRecipe:
    """The recipe with a folder of its model's config and tokenizer, which are fetched if the model is on the Hub.

    Raises:
        RecipeError: they cannot be fetched.
    """
    if (model := hub_model(loaded.recipe.model.path)) is None:
        return loaded
    try:
        return with_model(loaded, fetch(model, SMALL_FILES))
    except ValueError as error:
        raise RecipeError([loaded.problem("model.path", str(error))]) from error


def _on_hub(loaded: LoadedRecipe) -> dict[str, HubModel]:
    """Models of the recipe that are on the Hub, by their keys."""
    paths = {"model.path": loaded.recipe.model.path}
    if is_needed("teacher", loaded.command) and loaded.recipe.teacher.path:
        paths["teacher.path"] = loaded.recipe.teacher.path
    found = {key: hub_model(path) for key, path in paths.items()}
    return {key: model for key, model in found.items() if model is not None}


def with_cached_model(loaded: LoadedRecipe) -> LoadedRecipe:
    """The recipe with the folders of its model and its teacher in the cache, where they are on the Hub and there."""
    for key, model in _on_hub(loaded).items():
        if (folder := cached(model)) is not None:
            loaded = _PUT[key](loaded, folder)
    return loaded
