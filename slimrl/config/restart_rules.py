"""Rules of a trainer that is started anew in place: nodes for it, and copies in memory, from which it goes on."""

from collections.abc import Iterator

from slimrl.config.problems import Violation
from slimrl.config.schema.recipe import Recipe

IN_MEMORY = "checkpoint.in_memory_every_steps"
SPARES = "trainer.spare_nodes"

RESTARTING = ("train", "sft")
"""Commands that start a trainer anew. Training on a file of trajectories ignores what is for that."""


def spare_violations(recipe: Recipe, command: str) -> Iterator[Violation]:
    """Nodes in reserve for a trainer that is never started anew on another node."""
    spares = recipe.trainer.spare_nodes
    if not spares:
        return
    if not recipe.run.max_restarts:
        yield SPARES, f"{spares}: no trainer would be started anew on them, since run.max_restarts is 0. Use 0."
    elif command == "train" and recipe.rollout.colocated:
        yield SPARES, f"{spares}: with rollout.colocated a lost node takes engines with it, which ends the run. Use 0."


def copy_violations(recipe: Recipe) -> Iterator[Violation]:
    """Copies in memory that nothing would read."""
    every = recipe.checkpoint.in_memory_every_steps
    if every and not (recipe.run.max_restarts or recipe.stop.rewind_not_finite):
        never = "run.max_restarts is 0 and stop.rewind_not_finite false"
        yield IN_MEMORY, f"{every}: only a trainer that is started anew reads them, and {never}. Use 0."
