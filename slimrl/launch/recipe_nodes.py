"""`python -m slimrl.launch.recipe_nodes`: checks that a job's nodes fit its recipe.

Runs once, on the head node, before the all-reduce and Ray: it checks the recipe by all rules and places trainer ranks,
engines and teacher as the run will. It prints what is wrong, or which nodes would stay idle.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from slimrl.base.errors import StageError
from slimrl.config.check import check_loaded
from slimrl.config.load import read_recipe
from slimrl.config.problems import RecipeError
from slimrl.config.restart_rules import SPARES
from slimrl.launch.submit import nodes_needed, process_counts
from slimrl.runtime.cluster.placement import Node, place
from slimrl.runtime.cluster.spare_nodes import split_spares


def main() -> None:
    """Exit code 1 if the recipe is refused, or the nodes are too few or too small for it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--unit", required=True, help="kind of slot: GPUs or cores")
    parser.add_argument("--node", action="append", required=True, metavar="NAME=SLOTS", help="the head first")
    parser.add_argument("--spare-nodes", type=int, default=0, help="that the job was told of")
    parser.add_argument("--sft", action="store_true")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="RECIPE [KEY=VALUE]...")
    arguments = parser.parse_args()
    slots = {name: int(number) for name, _, number in (node.rpartition("=") for node in arguments.node)}
    recipe, *others = arguments.rest
    # Options of the command, none of which takes a value, may stand between the settings.
    overrides = [text for text in others if not text.startswith("-")]
    try:
        idle = idle_nodes(
            Path(recipe), overrides, slots, spare_nodes=arguments.spare_nodes, sft=arguments.sft, unit=arguments.unit
        )
    except (ValueError, StageError) as error:
        sys.exit(str(error))
    if idle:
        print(f"idle nodes: {', '.join(idle)}; the run needs {len(slots) - len(idle)} of {len(slots)} nodes")


def idle_nodes(
    path: Path, overrides: Sequence[str], slots: dict[str, int], *, spare_nodes: int, sft: bool, unit: str
) -> list[str]:
    """Nodes without a process of the run.

    Args:
        slots: GPUs or cores (`unit`) of each node, the head first.
        spare_nodes: number of nodes without which the job goes on.

    Raises:
        RecipeError: the recipe is refused, or keeps another number of nodes free.
        StageError: the nodes are too few; the message says how many are enough.
        ValueError: no number of nodes of this size is enough.
    """
    loaded, problems = read_recipe(path, overrides, "sft" if sft else "train")
    if loaded is not None:
        problems += [problem for problem in check_loaded(loaded) if not problem.warning]
    if loaded is None or problems:
        raise RecipeError(problems)
    recipe = loaded.recipe
    if (kept := recipe.trainer.spare_nodes) != spare_nodes:
        said = f"is {kept}, and the job's --spare-nodes {spare_nodes}. Give it --spare-nodes {kept}"
        raise RecipeError([loaded.problem(SPARES, said + (", and sbatch --no-kill." if kept else "."))])
    nodes = [Node(node_id=name, name=name, address=name, slots=number) for name, number in slots.items()]
    try:
        nodes, spares = split_spares(nodes, recipe.trainer.spare_nodes)
        placement = place(recipe, nodes, **process_counts(recipe, sft=sft), unit=unit)
    except StageError as error:
        size = min(slots.values())
        needed = nodes_needed(recipe, size, sft=sft) + recipe.trainer.spare_nodes
        raise StageError(f"{error}. Nodes of {size} {unit} needed: {needed}.") from error
    used = {slot.node.name for slot in placement.slots} | {node.name for node in spares}
    return [name for name in slots if name not in used]


if __name__ == "__main__":
    main()
