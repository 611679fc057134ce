"""Rules of the section `algorithm`."""

from collections.abc import Iterator, Sequence

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
)
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
            meant = suggestion(value, known) or f" Known are {', '.join(known)}."
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
