"""A recipe as the planner reads it: checked by all rules, though neither checkpoint nor data need be here."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimrl.config.load import intended_command
from slimrl.config.schema import Recipe
from slimrl.models.planned_recipe import read_planned


@dataclass(frozen=True, kw_only=True)
class Planned:
    recipe: Recipe
    hf_config: dict[str, Any]
    model: str
    """A few words on where the config is from"""
    sft: bool
    """Whether it is a recipe of `slimrl sft`, which has no engines."""

    @property
    def longest_tokens(self) -> int:
        """Tokens of a trajectory or conversation, at most."""
        return self.recipe.sft.max_tokens if self.sft else self.recipe.rollout.max_trajectory_tokens


def read(path: Path, overrides: Sequence[str]) -> Planned:
    """Raises ValueError: the recipe breaks a rule, or its model is not known here or not supported."""
    command = intended_command(path, overrides)
    planned = read_planned(path, overrides, command)
    return Planned(recipe=planned.loaded.recipe, hf_config=planned.hf_config, model=planned.model, sft=command == "sft")
