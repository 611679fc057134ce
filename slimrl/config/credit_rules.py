"""Rules of credit over turns, the selection of trajectories, and the refill of zero-variance groups."""

from collections.abc import Iterator
from itertools import pairwise

from slimrl.config.problems import Violation
from slimrl.config.schema.algorithm import AdvantageName
from slimrl.config.schema.credit import CreditName, RefillMode, SelectionMode
from slimrl.config.schema.recipe import Recipe

COMPARING_TURNS = (AdvantageName.grpo, AdvantageName.dr_grpo, AdvantageName.rloo)
"""Advantages that may also compare the turns of a group, with a `credit.name` other than `trajectory`."""


def credit_violations(recipe: Recipe) -> Iterator[Violation]:
    """Settings of `algorithm.credit`, `selection`, `dynamic_sampling` and `overlong` that contradict others."""
    yield from _turn_violations(recipe)
    yield from _stage_violations(recipe)
    yield from _selection_violations(recipe)
    yield from _refill_violations(recipe)
    overlong = recipe.algorithm.overlong
    if overlong.max_tokens is not None and overlong.buffer_tokens > overlong.max_tokens:
        yield (
            "algorithm.overlong.buffer_tokens",
            f"{overlong.buffer_tokens} is more than algorithm.overlong.max_tokens {overlong.max_tokens}.",
        )


def _turn_violations(recipe: Recipe) -> Iterator[Violation]:
    credit, advantage = recipe.algorithm.credit, recipe.algorithm.advantage
    by_turn = credit.name is not CreditName.trajectory
    given = advantage == AdvantageName.given
    if by_turn and advantage not in COMPARING_TURNS and not (given and credit.name is CreditName.turn):
        others = ", ".join(kind.value for kind in COMPARING_TURNS)
        yield (
            "algorithm.credit.name",
            f"{credit.name.value} compares turns with algorithm.advantage {others}, not with {advantage}.",
        )


def _stage_violations(recipe: Recipe) -> Iterator[Violation]:
    credit = recipe.algorithm.credit
    stages = len(credit.stage_starts) + 1
    for name in ("process_weights", "outcome_weights"):
        weights = getattr(credit, name)
        if len(weights) != stages:
            yield (
                f"algorithm.credit.{name}",
                f"has {len(weights)} weights for {stages} stages: one more than algorithm.credit.stage_starts has "
                "steps.",
            )
    if any(later <= earlier for earlier, later in pairwise([1, *credit.stage_starts])):
        yield "algorithm.credit.stage_starts", f"{credit.stage_starts}: must be steps above 1 in rising order."


def _selection_violations(recipe: Recipe) -> Iterator[Violation]:
    selection, samples = recipe.algorithm.selection, recipe.rollout.samples_per_prompt
    if selection.mode is SelectionMode.best_and_worst and 2 * selection.count >= samples:
        yield (
            "algorithm.selection.count",
            f"{selection.count} best and as many worst leave out none of rollout.samples_per_prompt {samples}. Use "
            "less, or algorithm.selection.mode all.",
        )
    if selection.mode is SelectionMode.best and selection.count > samples:
        yield (
            "algorithm.selection.count",
            f"{selection.count} is more than rollout.samples_per_prompt {samples}.",
        )
    if selection.mode is SelectionMode.best and recipe.algorithm.credit.by_turn:
        yield (
            "algorithm.selection.mode",
            "best gives every trajectory advantage 1, so turns cannot differ. Use algorithm.credit.name trajectory "
            "without turn_weights.",
        )


def _refill_violations(recipe: Recipe) -> Iterator[Violation]:
    refill, algorithm = recipe.algorithm.dynamic_sampling.refill, recipe.algorithm
    if refill is RefillMode.off:
        return
    if not algorithm.skip_zero_variance and not recipe.has_critic:
        yield (
            "algorithm.dynamic_sampling.refill",
            f"{refill.value} replaces zero-variance groups, which algorithm.skip_zero_variance false keeps. Use "
            "true, or refill off.",
        )
    if algorithm.advantage == AdvantageName.none:
        yield (
            "algorithm.dynamic_sampling.refill",
            f"{refill.value} replaces zero-variance groups, and algorithm.advantage none has none. Use off.",
        )
    if refill is RefillMode.value and recipe.data.weights:
        yield (
            "algorithm.dynamic_sampling.refill",
            "value draws from all files alike, against data.weights. Use order, or leave data.weights out.",
        )
