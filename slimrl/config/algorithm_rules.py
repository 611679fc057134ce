"""Rules of the sections `algorithm` and `stop`."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from slimrl.config.elsewhere import value_here
from slimrl.config.problems import Violation, suggestion
from slimrl.config.schema.algorithm import (
    AdvantageName,
    CorrectionConfig,
    CorrectionLevel,
    CorrectionMode,
    KlEstimator,
    KlPlace,
    LossName,
    OldPolicy,
    RoutingReplay,
)
from slimrl.config.schema.credit import CreditName, RefillMode, SelectionMode
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.types import MODULE_FUNCTION

SEQUENCE_LOSSES = (LossName.gspo.value, LossName.gspo_token.value)
TOKEN_CLIPPED_LOSSES = (LossName.ppo.value, LossName.cispo.value, LossName.gmpo.value)


def algorithm_violations(recipe: Recipe) -> Iterator[Violation]:
    """Names that nothing has, and settings that exclude each other."""
    algorithm = recipe.algorithm
    choices: dict[str, tuple[str, Sequence[LossName | AdvantageName]]] = {
        "loss": (algorithm.loss, [*LossName]),
        "advantage": (algorithm.advantage, [*AdvantageName]),
    }
    for key, (value, members) in choices.items():
        known = [member.value for member in members]
        if value not in known and not MODULE_FUNCTION.fullmatch(value):
            here = value_here(f"algorithm.{key}", value)
            meant = suggestion(here or value, known) or f" Known are {', '.join(known)}."
            yield f"algorithm.{key}", f"{value!r} is neither one of ours nor an import path module:function.{meant}"
    if algorithm.clip_low > 1:
        yield (
            "algorithm.clip_low",
            f"{algorithm.clip_low}: ratios are positive. Use at most 1, which is no lower bound.",
        )
    if algorithm.loss == LossName.gmpo.value and algorithm.clip_low == 1:
        yield "algorithm.clip_low", "1: gmpo takes the logarithm of 1 - clip_low. Use less than 1."
    if algorithm.dual_clip and algorithm.dual_clip <= 1:
        yield "algorithm.dual_clip", f"{algorithm.dual_clip}: it bounds ratios above 1. Use 3, or 0 for off."
    if algorithm.dual_clip and algorithm.loss != LossName.ppo.value:
        yield "algorithm.dual_clip", f"the loss {algorithm.loss} has none. Use 0, or algorithm.loss: ppo."
    if algorithm.credit.by_turn and algorithm.loss == LossName.gspo.value:
        message = "gspo is a loss of whole trajectories, whose turns cannot differ. Use loss: gspo_token."
        yield "algorithm.credit.name", message
    yield from _teacher_violations(recipe)
    yield from _kl_violations(recipe)
    yield from _correction_violations(recipe)


def algorithm_warnings(recipe: Recipe) -> Iterator[Violation]:
    """Clip ranges of another kind of ratio."""
    algorithm = recipe.algorithm
    for name in ("clip_low", "clip_high"):
        value = getattr(algorithm, name)
        if algorithm.loss in SEQUENCE_LOSSES and value > 1e-2:
            message = f"{value} is a range for per-token ratios; GSPO's sequence ratios move by about 1e-4 to 1e-3."
            yield f"algorithm.{name}", message
        elif algorithm.loss in TOKEN_CLIPPED_LOSSES and value < 1e-2:
            message = f"{value} is a range for GSPO's sequence ratios; those of tokens move by about 0.2."
            yield f"algorithm.{name}", message


def _teacher_violations(recipe: Recipe) -> Iterator[Violation]:
    algorithm = recipe.algorithm
    if algorithm.advantage == AdvantageName.none and not algorithm.teacher_coef:
        yield "algorithm.advantage", "none: nothing would be learned without algorithm.teacher_coef."
    if algorithm.teacher_coef and algorithm.loss == LossName.gspo.value:
        message = f"{algorithm.teacher_coef}: advantages would differ by token, and gspo is of whole sequences. Use "
        yield "algorithm.teacher_coef", message + "loss: gspo_token."


def _kl_violations(recipe: Recipe) -> Iterator[Violation]:
    algorithm = recipe.algorithm
    if not algorithm.kl_coef:
        return
    in_reward = algorithm.kl_place is KlPlace.reward
    if algorithm.kl_estimator is KlEstimator.k1 and not in_reward:
        message = "k1: as a loss its gradient is zero on average. Use k2 or k3, or algorithm.kl_place: reward."
        yield "algorithm.kl_estimator", message
    if algorithm.kl_estimator is not KlEstimator.k1 and in_reward:
        message = f"{algorithm.kl_estimator.value}: in the reward the unbiased estimator is k1. Use k1."
        yield "algorithm.kl_estimator", message
    if in_reward and algorithm.loss == LossName.gspo.value:
        message = "reward: advantages would differ by token, and gspo is of whole sequences. Use loss: gspo_token."
        yield "algorithm.kl_place", message


def _correction_violations(recipe: Recipe) -> Iterator[Violation]:
    correction = recipe.algorithm.correction
    if correction.is_active and recipe.algorithm.old_policy is OldPolicy.rollout:
        message = "rollout: the ratio has the engines' difference in it already. Use trainer, or no correction."
        yield "algorithm.old_policy", message
    weighted, truncates = correction.level is not CorrectionLevel.off, correction.mode is CorrectionMode.truncate
    if weighted and truncates and correction.low != CorrectionConfig.low:
        yield (
            "algorithm.correction.low",
            "only algorithm.correction.mode clip and mask read it, and the mode is truncate. Use "
            f"{CorrectionConfig.low:g}, or another mode.",
        )
    if weighted and not truncates and correction.low >= correction.high:
        yield "algorithm.correction.low", f"{correction.low} is not below algorithm.correction.high {correction.high}."
    if correction.veto >= 1:
        message = f"{correction.veto}: a fraction of the engine's probability; use one such as 1e-4."
        yield "algorithm.correction.veto", message


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


def routing_violations(recipe: Recipe, experts: int | None, command: str) -> Iterator[Violation]:
    """Settings under which routers cannot replay.

    Args:
        experts: of a layer, 0 for a dense model, None if unknown.
    """
    mode, given = recipe.algorithm.routing_replay, recipe.trainer.megatron
    if mode is RoutingReplay.off:
        return
    key = "algorithm.routing_replay"
    if command == "sft":
        yield key, f"{mode.value}: supervised training has no earlier pass and no engine to replay. Use off."
    elif experts == 0:
        yield key, f"{mode.value}: the model has no experts. Use off."
    elif mode is RoutingReplay.rollout and not recipe.rollout.routed_experts:
        yield key, "rollout needs the experts that engines report. Set rollout.routed_experts: true."
    if given.get("moe_router_fusion"):
        yield "trainer.megatron.moe_router_fusion", f"the fused router ignores {key}: {mode.value}. Leave it out."


LIMITS = ("mismatch", "kl", "entropy_min", "entropy_max", "grad_norm", "effective_sample_size_min")
"""Settings of the section that limit a metric."""

OF_SFT = ("grad_norm",)
"""Settings of LIMITS whose metric supervised training records."""


def stop_violations(recipe: Recipe, command: str) -> Iterator[Violation]:
    """Limits that cannot hold, never apply, or are of metrics that the command does not record."""
    stop, most = recipe.stop, recipe.algorithm.max_logprob_mismatch
    given = {name: value for name in LIMITS if (value := getattr(stop, name)) is not None}
    for name in given:
        if command == "sft" and name not in OF_SFT:
            yield f"stop.{name}", "supervised training does not record this metric. Use null."
    if command == "train" and stop.mismatch is not None and stop.mismatch >= most:
        yield (
            "stop.mismatch",
            f"{stop.mismatch} is not below algorithm.max_logprob_mismatch {most}, above which the run stops at once.",
        )
    if stop.entropy_min is not None and stop.entropy_max is not None and stop.entropy_min >= stop.entropy_max:
        yield "stop.entropy_min", f"{stop.entropy_min} is not below stop.entropy_max {stop.entropy_max}."
