"""Collects the problems of several steps, so that a user sees all of them at once."""

from collections.abc import Callable
from dataclasses import replace

from slimrl.base.rows import BrokenRows
from slimrl.config.load import LoadedRecipe
from slimrl.config.problems import Problem, RecipeError


class ProblemCollector:
    """Runs the steps of reading a recipe's files, and keeps the problems of those that fail."""

    def __init__(self, loaded: LoadedRecipe) -> None:
        self._loaded = loaded
        self.problems: list[Problem] = []

    def get[T](self, key: str, action: Callable[[], T]) -> T | None:
        """What the action returns; None if it raises ValueError, which becomes a problem of `key`."""
        try:
            return action()
        except RecipeError as error:
            self.problems += error.problems
        except ValueError as error:
            count = error.count if isinstance(error, BrokenRows) else 1
            self.problems.append(replace(self._loaded.problem(key, str(error)), count=count))
        return None
