"""Rules of rollouts beside the training: `rollout.mode`."""

from collections.abc import Iterator

from slimrl.config.problems import Violation
from slimrl.config.schema.algorithm import CorrectionLevel, OldPolicy
from slimrl.config.schema.credit import RefillMode
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.rollout import RolloutConfig, RolloutMode, TooOld


def mode_violations(recipe: Recipe) -> Iterator[Violation]:
    rollout = recipe.rollout
    mode = rollout.mode.value
    for name in ("max_staleness", "too_old"):
        value = getattr(rollout, name)
        if rollout.mode is not RolloutMode.async_ and value != getattr(RolloutConfig, name):
            yield f"rollout.{name}", f"only rollout.mode async reads it, and the mode is {mode}."
    if rollout.mode is RolloutMode.sync:
        return
    if recipe.deterministic:
        yield (
            "rollout.mode",
            f"{mode} cannot be repeated bit by bit: what engines compute together depends on when requests arrive. "
            "Use sync, or deterministic false.",
        )
    if rollout.colocated:
        yield (
            "rollout.mode",
            f"{mode} needs engines that sample while the trainer works. Use sync, or rollout.colocated false.",
        )
    if recipe.algorithm.dynamic_sampling.refill is RefillMode.value:
        yield (
            "algorithm.dynamic_sampling.refill",
            f"value chooses prompts once for each step, which rollout.mode {mode} has not. Use order, by which other "
            "prompts take the place of groups without a signal.",
        )


def mode_warnings(recipe: Recipe) -> Iterator[Violation]:
    rollout, algorithm = recipe.rollout, recipe.algorithm
    if rollout.mode is RolloutMode.sync:
        return
    if rollout.mode is RolloutMode.async_ and rollout.too_old is TooOld.train:
        yield (
            "rollout.too_old",
            f"train gives up the bound: groups older than rollout.max_staleness {rollout.max_staleness} are trained "
            "on; async/age_max shows how old.",
        )
    if algorithm.old_policy is OldPolicy.trainer and algorithm.correction.level is CorrectionLevel.off:
        yield (
            "rollout.mode",
            f"with {rollout.mode.value} earlier weights sampled most of the tokens, and nothing accounts for it. Set "
            "algorithm.old_policy rollout, or an algorithm.correction.level.",
        )
