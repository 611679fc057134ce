"""`python -m slimrl.launch.recipe_nodes`: whether the nodes of a job are those that its recipe needs.

Run once, on the head node, before the nodes meet and Ray starts: the recipe is checked by all rules, and trainer ranks
and engines get their places as in the run. It prints what is wrong, or which nodes the run would leave without work.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from slimrl.config.check import check_loaded
from slimrl.config.load import load_recipe
from slimrl.config.problems import RecipeError
from slimrl.launch.submit import nodes_needed
from slimrl.runtime.errors import StageError
from slimrl.runtime.placement import Node, place


def main() -> None:
    """Exit code 1 where the recipe is refused, or the nodes are too few or too small for it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--unit", required=True, help="what a slot is: GPUs or cores")
    parser.add_argument("--node", action="append", required=True, metavar="NAME=SLOTS", help="the head first")
    parser.add_argument("--sft", action="store_true")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="RECIPE [KEY=VALUE]...")
    arguments = parser.parse_args()
    slots = {name: int(number) for name, _, number in (node.rpartition("=") for node in arguments.node)}
    recipe, *others = arguments.rest
    # Beside settings there may be options of the command, all of them without a value.
    overrides = [text for text in others if not text.startswith("-")]
    try:
        idle = idle_nodes(Path(recipe), overrides, slots, sft=arguments.sft, unit=arguments.unit)
    except (ValueError, StageError) as error:
        sys.exit(str(error))
    if idle:
        print(f"the run leaves {', '.join(idle)} without work: it needs {len(slots) - len(idle)} of {len(slots)} nodes")


def idle_nodes(path: Path, overrides: Sequence[str], slots: dict[str, int], *, sft: bool, unit: str) -> list[str]:
    """Nodes that neither a trainer rank nor an engine of the run has its place on.

    Args:
        slots: GPUs or cores of each node, the head first.
        unit: which of the two, for errors.

    Raises:
        RecipeError: the recipe is refused.
        StageError: the nodes are too few; it says how many are enough.
        ValueError: no number of nodes of this size is enough.
    """
    loaded = load_recipe(path, overrides, "sft" if sft else "train")
    if problems := [problem for problem in check_loaded(loaded) if not problem.warning]:
        raise RecipeError(problems)
    recipe = loaded.recipe
    nodes = [Node(node_id=name, name=name, address=name, slots=number) for name, number in slots.items()]
    num_engines = 0 if sft else recipe.rollout.num_engines
    try:
        placement = place(recipe, nodes, num_ranks=recipe.trainer.num_ranks, num_engines=num_engines, unit=unit)
    except StageError as error:
        size = min(slots.values())
        raise StageError(
            f"{error}. Nodes of {size} {unit} that are enough: {nodes_needed(recipe, size, sft=sft)}."
        ) from error
    used = {slot.node.name for slot in placement.slots}
    return [name for name in slots if name not in used]


if __name__ == "__main__":
    main()
