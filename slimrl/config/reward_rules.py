"""Rules of the section `reward`: where the reward comes from, and its parts."""

from collections.abc import Iterator

from slimrl.config.load import is_needed
from slimrl.config.problems import Violation
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.reward import RewardConfig, RewardPartConfig

OVERLONG = "overlong"
"""Name of the reward part that `algorithm.overlong` adds."""


def reward_parts(reward: RewardConfig) -> Iterator[tuple[str, RewardPartConfig]]:
    """Every part of the reward, with the key of its section, such as `reward.parts.math`."""
    for section in ("parts", "by_name", "group"):
        for name, part in getattr(reward, section).items():
            yield f"reward.{section}.{name}", part


def reward_violations(recipe: Recipe, command: str) -> Iterator[Violation]:
    """No reward, two of them, parts of the same name or of impossible values, and evaluations without a reward."""
    if not is_needed("reward", command):
        return
    reward = recipe.reward
    if not (reward.function or reward.parts or reward.by_name or reward.group):
        yield "reward.function", "missing. Give it, or parts in reward.parts, reward.by_name or reward.group."
    if reward.function and (reward.parts or reward.by_name):
        other = "reward.parts" if reward.parts else "reward.by_name"
        yield "reward.function", f'{other} has the reward too. Give one of the two; function: "" removes this one.'
    seen: dict[str, str] = {}
    for key, _ in reward_parts(reward):
        name = key.rpartition(".")[2]
        if name in seen:
            yield key, f"{seen[name]} has this name too. Use another."
        seen.setdefault(name, key)
        if name == OVERLONG and recipe.algorithm.overlong.max_tokens is not None:
            yield key, "algorithm.overlong adds a part of this name. Use another."
    only_groups = reward.group and not (reward.function or reward.parts or reward.by_name)
    if only_groups and recipe.data.eval and is_needed("data.eval", command):
        yield (
            "reward.group",
            "an evaluation has one trajectory per prompt, and so no reward of groups. Add reward.function or "
            "reward.parts, or remove data.eval.",
        )
