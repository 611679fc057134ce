"""Settings of a trainer that is started anew, which are refused where it never is."""

import pytest

from slimrl.config.critic import critic_violations
from slimrl.config.restart_rules import copy_violations, spare_violations
from slimrl.config.schema.algorithm import AdvantageName
from slimrl.config.schema.recipe import Recipe


def recipe_of(*, copies: int = 0, spares: int = 0, restarts: int = 3) -> Recipe:
    recipe = Recipe()
    recipe.checkpoint.in_memory_every_steps = copies
    recipe.trainer.spare_nodes, recipe.run.max_restarts = spares, restarts
    return recipe


@pytest.mark.parametrize(
    ("command", "restarts", "why"),
    [
        ("train", 3, None),
        ("sft", 3, None),
        ("train", 0, "run.max_restarts is 0"),
        ("sft", 0, "run.max_restarts is 0"),
        ("train --trajectories", 3, "training on a file"),
    ],
)
def test_what_nothing_would_use_is_refused(command: str, restarts: int, why: str | None):
    for rule, settings, key in (
        (copy_violations, {"copies": 2}, "checkpoint.in_memory_every_steps"),
        (spare_violations, {"spares": 2}, "trainer.spare_nodes"),
    ):
        found = list(rule(recipe_of(**settings, restarts=restarts), command))
        assert [given for given, _ in found] == ([] if why is None else [key])
        assert all(message.startswith("2: ") and why in message and message.endswith("Use 0.") for _, message in found)
        assert list(rule(recipe_of(restarts=restarts), command)) == []


def test_spare_nodes_are_of_the_whole_run():
    recipe = recipe_of(spares=1)
    recipe.algorithm.advantage = AdvantageName.gae
    recipe.steps = 5
    keys = [key for key, _ in critic_violations(recipe)]
    assert "critic.trainer.spare_nodes" in keys
    recipe.critic.trainer.spare_nodes = 1
    assert "critic.trainer.spare_nodes" not in [key for key, _ in critic_violations(recipe)]
