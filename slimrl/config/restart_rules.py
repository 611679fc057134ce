"""Rules of a trainer that is started anew in place: copies in memory, from which it goes on."""

from collections.abc import Iterator

from slimrl.config.problems import Violation
from slimrl.config.schema.recipe import Recipe

IN_MEMORY = "checkpoint.in_memory_every_steps"


def copy_violations(recipe: Recipe, command: str) -> Iterator[Violation]:
    """Copies in memory that nothing would read."""
    every = recipe.checkpoint.in_memory_every_steps
    if every and command == "train --trajectories":
        yield IN_MEMORY, f"{every}: training on a file of trajectories keeps no checkpoints. Use 0."
    elif every and not recipe.run.max_restarts:
        yield IN_MEMORY, f"{every}: only a trainer that is started anew reads them, and run.max_restarts is 0. Use 0."
