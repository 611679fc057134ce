"""Rules of a trainer that is started anew in place: nodes for it, and copies in memory, from which it goes on."""

from collections.abc import Iterator

from slimrl.config.problems import Violation
from slimrl.config.schema.recipe import Recipe

IN_MEMORY = "checkpoint.in_memory_every_steps"


def spare_violations(recipe: Recipe, command: str) -> Iterator[Violation]:
    """Nodes in reserve for a trainer that is never started anew."""
    spares = recipe.trainer.spare_nodes
    if spares and (command == "train --trajectories" or not recipe.run.max_restarts):
        why = "run.max_restarts is 0" if recipe.run.max_restarts == 0 else "training on a file ends with its trainer"
        yield "trainer.spare_nodes", f"{spares}: no trainer would be started anew on them, since {why}. Use 0."


def copy_violations(recipe: Recipe, command: str) -> Iterator[Violation]:
    """Copies in memory that nothing would read."""
    every = recipe.checkpoint.in_memory_every_steps
    if every and command == "train --trajectories":
        yield IN_MEMORY, f"{every}: training on a file of trajectories keeps no checkpoints. Use 0."
    elif every and not recipe.run.max_restarts:
        yield IN_MEMORY, f"{every}: only a trainer that is started anew reads them, and run.max_restarts is 0. Use 0."
