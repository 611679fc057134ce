"""Settings of a trainer that is started anew, which are refused where it never is."""

from pathlib import Path

import pytest

from slimrl.config.check import check_recipe
from slimrl.config.critic import critic_violations
from slimrl.config.load import load_recipe
from slimrl.config.restart_rules import (
    copy_violations,
    rewind_warnings,
    spare_violations,
    spare_warnings,
    unused_spares,
)
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
    assert found[SPARES].endswith("Use 0.")
    assert found[COPIES].endswith("stop.rewind_not_finite is false. Use 0, or set one of these.")


def test_a_run_that_goes_back_for_what_is_not_finite_reads_copies():
    recipe = recipe_of(copies=2, restarts=0)
    recipe.stop.rewind_not_finite = True
    assert refused(recipe) == {}


def test_spare_nodes_are_refused_where_a_lost_node_ends_the_run():
    recipe = recipe_of(copies=2, spares=1, colocated=True)
    assert refused(recipe)[SPARES].startswith("1: with rollout.colocated a lost node takes engines with it")
    assert refused(recipe).keys() == {SPARES}
    assert refused(recipe, "sft") == {}


@pytest.mark.parametrize(
    ("copies", "on_disk", "use"),
    [(50, 50, "less than 50, or 0"), (100, 50, "less than 50, or 0"), (1, 1, "0"), (3, 1, "0")],
)
def test_copies_are_refused_where_a_checkpoint_on_the_disk_is_of_the_same_steps(copies: int, on_disk: int, use: str):
    recipe = recipe_of(copies=copies)
    recipe.checkpoint.every_steps = on_disk
    said = f"{copies}: a checkpoint on the disk (checkpoint.every_steps {on_disk}) is always as new. Use {use}."
    assert refused(recipe) == {COPIES: said}


@pytest.mark.parametrize(("copies", "on_disk"), [(0, 50), (5, 50), (49, 50), (70, 50), (5, 0)])
def test_copies_that_are_newer_at_some_steps_are_taken(copies: int, on_disk: int):
    recipe = recipe_of(copies=copies)
    recipe.checkpoint.every_steps = on_disk
    assert refused(recipe) == {}


@pytest.mark.parametrize(("spares", "restarts", "told"), [(3, 3, False), (4, 3, True), (0, 3, False), (1, 0, False)])
def test_more_spare_nodes_than_restarts_are_told(spares: int, restarts: int, told: bool):
    found = dict(spare_warnings(recipe_of(spares=spares, restarts=restarts)))
    assert found.keys() == ({SPARES} if told else set())
    if told:
        assert found[SPARES].startswith(f"{spares}: ")
        assert f"run.max_restarts ({restarts}) times within run.restart_window_s (3600 s)" in found[SPARES]


def test_spare_nodes_are_of_no_use_where_all_ranks_are_beside_the_driver():
    assert unused_spares(1, ["a", "a"], "a").startswith("1: all trainer ranks are on the driver's node")
    assert unused_spares(0, ["a"], "a") is None
    assert unused_spares(1, ["a", "b"], "a") is None
    # The driver's node may have no slot.
    assert unused_spares(1, ["b"], "a") is None


def test_a_run_that_would_go_back_to_its_beginning_is_told():
    recipe = recipe_of()
    assert not list(rewind_warnings(recipe))
    recipe.stop.rewind_not_finite = True
    ((key, message),) = rewind_warnings(recipe)
    assert key == "stop.rewind_not_finite"
    assert message.endswith("checkpoint.every_steps and checkpoint.in_memory_every_steps are 0. Set one of them.")
    for setting in ("every_steps", "in_memory_every_steps"):
        other = recipe_of()
        other.stop.rewind_not_finite = True
        setattr(other.checkpoint, setting, 2)
        assert not list(rewind_warnings(other))


@pytest.mark.parametrize(
    ("command", "keys"), [("train", {SPARES, "stop.rewind_not_finite"}), ("train --trajectories", set())]
)
def test_warnings_are_of_commands_that_start_a_trainer_anew(command: str, keys: set[str]):
    given = ["model.path=absent", "data.train=absent", f"{SPARES}=4", "stop.rewind_not_finite=true"]
    recipe = load_recipe(RECIPE, given, command=command).recipe
    warnings = {problem.key for problem in check_recipe(recipe, None, command) if problem.warning}
    assert warnings & {SPARES, "stop.rewind_not_finite"} == keys


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
