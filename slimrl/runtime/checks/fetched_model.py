"""A model that the recipe names by its id on the Hugging Face Hub, fetched before a start."""

from collections.abc import Sequence
from dataclasses import replace

from slimrl.config.check import check_loaded
from slimrl.config.hub import CONFIG_FILES, cached, fetch, hub_model, with_model
from slimrl.config.load import LoadedRecipe
from slimrl.config.problems import Problem, RecipeError
from slimrl.observability.progress import Progress


def fetch_model(loaded: LoadedRecipe, problems: Sequence[Problem], progress: Progress) -> LoadedRecipe:
    """The recipe with the folder of its model, fetched if it is on the Hub.

    The weights are fetched when the model's config.json and the recipe have passed all rules.

    Args:
        problems: already known ones of the recipe.

    Raises:
        RecipeError: it has problems, or the model cannot be fetched.
    """
    model = hub_model(loaded.recipe.model.path)
    if model is None:
        return loaded
    try:
        with progress.stage(f"fetching {model.model_id}"):
            config = fetch(model, CONFIG_FILES)
            refused = [*problems, *check_loaded(with_model(loaded, config))]
            if all(problem.warning for problem in refused):
                # The commit of that config, whatever is published meanwhile.
                return with_model(loaded, fetch(replace(model, revision=config.name)))
    except ValueError as error:
        raise RecipeError([*problems, loaded.problem("model.path", str(error))]) from error
    raise RecipeError([problem for problem in refused if not problem.warning])


def with_cached_model(loaded: LoadedRecipe) -> LoadedRecipe:
    """The recipe with the folder of its model in the cache, if it is on the Hub and there."""
    model = hub_model(loaded.recipe.model.path)
    folder = None if model is None else cached(model)
    return loaded if folder is None else with_model(loaded, folder)
