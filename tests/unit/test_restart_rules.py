"""Settings of a trainer that is started anew, which are refused where it never is."""

from pathlib import Path

import pytest

from slimrl.config.check import check_recipe
from slimrl.config.critic import critic_violations
from slimrl.config.load import load_recipe
from slimrl.config.restart_rules import copy_violations, spare_violations
from slimrl.config.schema.algorithm import AdvantageName
from slimrl.config.schema.recipe import Recipe


def recipe_of(*, copies: int = 0, spares: int = 0, restarts: int = 3, colocated: bool = False) -> Recipe:
    recipe = Recipe()
    recipe.rollout.colocated = colocated
    recipe.checkpoint.in_memory_every_steps = copies
    recipe.trainer.spare_nodes, recipe.run.max_restarts = spares, restarts
    return recipe


RECIPE = Path(__file__).parents[2] / "recipes" / "tiny_moe" / "gspo_calculator.yaml"
COPIES, SPARES = "checkpoint.in_memory_every_steps", "trainer.spare_nodes"


def refused(recipe: Recipe, command: str = "train") -> dict[str, str]:
    """Messages of the two rules, by key."""
    return dict([*copy_violations(recipe), *spare_violations(recipe, command)])


def test_what_nothing_would_use_is_refused():
    assert refused(recipe_of(copies=2, spares=2)) == refused(recipe_of(restarts=0)) == {}
    found = refused(recipe_of(copies=2, spares=2, restarts=0))
    assert found.keys() == {COPIES, SPARES}
    for message in found.values():
        assert message.startswith("2: ")
        assert "run.max_restarts is 0" in message
        assert message.endswith("Use 0.")


def test_a_run_that_goes_back_for_what_is_not_finite_reads_copies():
    recipe = recipe_of(copies=2, restarts=0)
    recipe.stop.rewind_not_finite = True
    assert refused(recipe) == {}


def test_spare_nodes_are_refused_where_a_lost_node_ends_the_run():
    recipe = recipe_of(copies=2, spares=1, colocated=True)
    assert refused(recipe)[SPARES].startswith("1: with rollout.colocated a lost node takes engines with it")
    assert refused(recipe).keys() == {SPARES}
    assert refused(recipe, "sft") == {}


@pytest.mark.parametrize(("command", "keys"), [("train", {COPIES, SPARES}), ("train --trajectories", set())])
def test_training_on_a_file_takes_recipes_as_they_are(command: str, keys: set[str]):
    given = ["model.path=absent", "data.train=absent", f"{COPIES}=2", f"{SPARES}=2", "run.max_restarts=0"]
    recipe = load_recipe(RECIPE, given, command=command).recipe
    assert {problem.key for problem in check_recipe(recipe, None, command)} & {COPIES, SPARES} == keys


def test_spare_nodes_are_of_the_whole_run():
    recipe = recipe_of(spares=1)
    recipe.algorithm.advantage = AdvantageName.gae
    recipe.steps = 5
    keys = [key for key, _ in critic_violations(recipe)]
    assert "critic.trainer.spare_nodes" in keys
    recipe.critic.trainer.spare_nodes = 1
    assert "critic.trainer.spare_nodes" not in [key for key, _ in critic_violations(recipe)]
