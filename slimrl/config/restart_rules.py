"""Rules of a trainer that is started anew in place: nodes for it, and copies in memory, from which it goes on."""

from collections.abc import Collection, Iterator

from slimrl.config.problems import Violation
from slimrl.config.schema.recipe import Recipe

IN_MEMORY = "checkpoint.in_memory_every_steps"
SPARES = "trainer.spare_nodes"

RESTARTING = ("train", "sft")
"""Commands that start a trainer anew. Training on a file of trajectories ignores what is for that."""


def spare_violations(recipe: Recipe, command: str) -> Iterator[Violation]:
    """Spare nodes of a trainer that is never started anew on another node."""
    spares = recipe.trainer.spare_nodes
    if not spares:
        return
    if not recipe.run.max_restarts:
        yield SPARES, f"{spares}: no trainer would be started anew on them, since run.max_restarts is 0. Use 0."
    elif command == "train" and recipe.rollout.colocated:
        yield SPARES, f"{spares}: with rollout.colocated a lost node takes engines with it, which ends the run. Use 0."


def spare_warnings(recipe: Recipe) -> Iterator[Violation]:
    """More spare nodes than times that the trainer may be started anew."""
    spares, run = recipe.trainer.spare_nodes, recipe.run
    if 0 < run.max_restarts < spares:
        yield (
            SPARES,
            f"{spares}: the trainer is started anew run.max_restarts ({run.max_restarts}) times within "
            f"run.restart_window_s ({run.restart_window_s:g} s), so further nodes help only after that. Lower it, or "
            "raise run.max_restarts.",
        )


def unused_spares(spares: int, nodes: Collection[str], driver: str) -> str | None:
    """Why spare nodes would never be used; None if they may be.

    Args:
        nodes: that have ranks of the trainer or of the critic.
        driver: the driver's node.
    """
    if not spares or set(nodes) - {driver}:
        return None
    return (
        f"{spares}: all trainer ranks are on the driver's node, whose loss ends the run, so none would ever be started "
        "anew on a spare node. Use 0."
    )


def copy_violations(recipe: Recipe) -> Iterator[Violation]:
    """Copies in memory that nothing would read."""
    every, on_disk = recipe.checkpoint.in_memory_every_steps, recipe.checkpoint.every_steps
    if not every:
        return
    if not (recipe.run.max_restarts or recipe.stop.rewind_not_finite):
        never = "nothing would read the copies: run.max_restarts is 0 and stop.rewind_not_finite is false"
        yield IN_MEMORY, f"{every}: {never}. Use 0, or set one of these."
    elif on_disk and every % on_disk == 0:
        fewer = f"less than {on_disk}, or 0" if on_disk > 1 else "0"
        yield (
            IN_MEMORY,
            f"{every}: a checkpoint on the disk (checkpoint.every_steps {on_disk}) is always as new. Use {fewer}.",
        )


def rewind_warnings(recipe: Recipe) -> Iterator[Violation]:
    """A run that would go back, and has nothing to go back to but its beginning."""
    checkpoint = recipe.checkpoint
    if recipe.stop.rewind_not_finite and not (checkpoint.every_steps or checkpoint.in_memory_every_steps):
        yield (
            "stop.rewind_not_finite",
            "the run would go back to its first step, for want of checkpoints: checkpoint.every_steps and "
            f"{IN_MEMORY} are 0. Set one of them.",
        )
