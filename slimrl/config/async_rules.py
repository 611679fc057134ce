"""Rules of asynchronous rollouts: `rollout.mode`."""

from collections.abc import Iterator

from slimrl.config.problems import Violation
from slimrl.config.schema.algorithm import CorrectionLevel, OldPolicy, RoutingReplay
from slimrl.config.schema.credit import RefillMode
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.resync import PauseMode, TransportName
from slimrl.config.schema.rollout import RolloutConfig, RolloutMode, TooOld


def mode_violations(recipe: Recipe) -> Iterator[Violation]:
    rollout = recipe.rollout
    mode = rollout.mode.value
    reads_age = rollout.spans_steps and rollout.mode is not RolloutMode.one_step_off
    for name in ("max_staleness", "too_old"):
        if not reads_age and getattr(rollout, name) != getattr(RolloutConfig, name):
            yield f"rollout.{name}", f"only rollout.mode async and rollout.oversample read it, and the mode is {mode}."
    if not recipe.resync.flush_cache:
        yield from _kept_cache_violations(recipe)
    if not rollout.spans_steps:
        return
    key, value = ("oversample", f"{rollout.oversample:g}") if rollout.mode is RolloutMode.sync else ("mode", mode)
    if rollout.oversample > 1 and rollout.mode is not RolloutMode.sync:
        yield "rollout.oversample", f"{rollout.oversample:g} is for rollout.mode sync, and the mode is {mode}. Use 1."
    if key == "oversample" and rollout.too_old is TooOld.wait and rollout.oversample > rollout.max_staleness + 1:
        yield (
            "rollout.oversample",
            f"{value} begins more groups than the {rollout.max_staleness + 1} updates take that rollout.max_staleness "
            f"{rollout.max_staleness} allows them, so with rollout.too_old wait no batch is ever taken. Use at most "
            f"{rollout.max_staleness + 1}, or drop.",
        )
    if recipe.deterministic:
        yield (
            f"rollout.{key}",
            f"{value} cannot be repeated bit by bit: what engines compute together depends on when requests arrive. "
            f"Use {'1' if key == 'oversample' else 'sync'}, or deterministic false.",
        )
    if key == "oversample" and recipe.resync.pause is not PauseMode.abort:
        yield (
            "rollout.oversample",
            f"{value} ends a step while requests run, which must leave the engines. Use resync.pause abort.",
        )
    if recipe.algorithm.routing_replay is RoutingReplay.rollout and recipe.resync.pause is PauseMode.retract:
        yield (
            "resync.pause",
            f"with rollout.{key} {value}, retract makes engines report the experts of new weights for tokens that old "
            "ones sampled. Use abort or in_place, or another algorithm.routing_replay.",
        )
    if rollout.colocated and key == "mode":
        yield (
            "rollout.mode",
            f"{mode} needs engines that sample while the trainer works. Use sync, or {_engines_apart(recipe)}.",
        )
    if (oversampling := recipe.algorithm.dynamic_sampling.oversampling) != 1:
        yield (
            "algorithm.dynamic_sampling.oversampling",
            f"{oversampling:g} is of the rollouts of a step, and rollout.{key} {value} has none: another group begins "
            "as soon as a zero-variance group has ended. Use 1.",
        )
    if recipe.algorithm.dynamic_sampling.refill is RefillMode.value:
        yield (
            "algorithm.dynamic_sampling.refill",
            f"value chooses prompts once for each step, not with rollout.{key} {value}. Use order, by which other "
            "prompts take the place of zero-variance groups.",
        )


def _kept_cache_violations(recipe: Recipe) -> Iterator[Violation]:
    """What `resync.flush_cache: false` excludes."""
    rollout, key = recipe.rollout, "resync.flush_cache"
    if rollout.mode is not RolloutMode.async_ and rollout.oversample == 1:
        mode = rollout.mode.value
        yield (
            key,
            f"false is for trajectories that go on after a resync, and rollout.mode {mode} has none. Use true.",
        )
    elif recipe.resync.pause is PauseMode.retract:
        yield key, "false has no use with resync.pause retract, which computes all again. Use abort or in_place."
    if rollout.colocated:
        yield key, f"false needs engines that keep their memory. Use true, or {_engines_apart(recipe)}."


def _engines_apart(recipe: Recipe) -> str:
    """The settings that a colocated recipe needs for engines on GPUs of their own, and for its mode there."""
    settings = ["rollout.colocated false"]
    if recipe.resync.transport is TransportName.ipc:
        settings.append("resync.transport p2p")
    if recipe.rollout.spans_steps and _unaccounted(recipe):
        settings.append("algorithm.correction.level token")
    return f"{', '.join(settings)}, with GPUs for the engines beside the trainer's"


def _unaccounted(recipe: Recipe) -> bool:
    """Whether nothing corrects that earlier weights sampled a token."""
    algorithm = recipe.algorithm
    return algorithm.old_policy is OldPolicy.trainer and algorithm.correction.level is CorrectionLevel.off


def mode_warnings(recipe: Recipe) -> Iterator[Violation]:
    rollout = recipe.rollout
    if not rollout.spans_steps:
        return
    if rollout.too_old is TooOld.train:
        yield (
            "rollout.too_old",
            f"train gives up the bound: groups older than rollout.max_staleness {rollout.max_staleness} are trained "
            "on; async/age_max shows how old.",
        )
    if _unaccounted(recipe):
        yield (
            "rollout.oversample" if rollout.mode is RolloutMode.sync else "rollout.mode",
            "earlier weights sample some or most of the tokens, and nothing accounts for it. Set "
            "algorithm.old_policy rollout, or an algorithm.correction.level.",
        )
