"""What an update minimises, as a sum over one micro-batch.

1. Values of the sampled tokens, with sums over whole trajectories.
2. The policy's loss by token, times the weights of the off-policy correction.
3. Plus the KL to the reference and minus the entropy bonus, by token.
4. Aggregation: each token's loss times its weight in the update. The caller adds over micro-batches and ranks and
   divides by the denominator of the whole update, so the result does not depend on how the batch was packed.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from slimrl.algorithms.correction import correction_terms, correction_weights
from slimrl.algorithms.kl import kl, kl_from_sampler, weighted_kl
from slimrl.algorithms.loss_types import PolicyTokens
from slimrl.algorithms.losses import SEQUENCE_TERMS, load_loss, log_ratio
from slimrl.algorithms.policy_tokens import (
    LossBatch,
    by_token,
    is_clamped,
    policy_tokens,
    whole_sums,
)
from slimrl.config.algorithms import TOKEN_LOSSES
from slimrl.config.schema.algorithm import Aggregation, AlgorithmConfig, KlPlace
from slimrl.data.packing import OLD_LOGPROBS
from slimrl.data.token_values import TRAINER_LOGPROBS

ObjectiveName = Literal["policy", "sft"]
"""What an update optimizes: `policy` the recipe's algorithm, `sft` the likelihood of the tokens in the loss mask."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LossSums:
    """Sums over a micro-batch: `loss` has a gradient, all else has none."""

    loss: Tensor
    losses_T: Tensor
    """Each token's part of the loss; 0 where it is masked"""
    reported: dict[str, Tensor]
    by_token: dict[str, Tensor] = field(default_factory=dict)
    """float [T] by the names of TOKEN_VALUES, what a run may record of each token; meaningless if it is masked"""


LossFunction = Callable[[Tensor, Tensor, LossBatch], LossSums]
"""Function of (log-probs [T], entropy [T], batch) that gives sums, which the caller adds over micro-batches and
ranks."""


def loss_function(name: ObjectiveName, settings: AlgorithmConfig, entropy_coef: float = 0.0) -> LossFunction:
    if name == "sft":
        return cross_entropy
    return partial(policy_objective, settings=settings, entropy_coef=entropy_coef)


def policy_objective(
    logprobs_T: Tensor, entropy_T: Tensor, batch: LossBatch, *, settings: AlgorithmConfig, entropy_coef: float
) -> LossSums:
    """The objective of the recipe's algorithm, summed over a micro-batch.

    Args:
        logprobs_T: log pi of the targets, natural log, float32, differentiable; masked values may be NaN.
        entropy_T: of the distribution at each position, differentiable.

    Returns:
        `reported` has, besides `loss`: `weight` and `clipped`, whose ratio is the fraction that is clipped; `tokens`,
        and sums over them of `clamped` (a log-ratio of the loss was), `kl_old` (of the old policy to the present one),
        `importance` and `importance_squared` (pi / pi_engine), and as configured `kl` (to the reference) and
        `correction`.
    """
    tokens = policy_tokens(logprobs_T, batch, settings)
    sums_N = whole_sums(sequence_terms(tokens, settings), batch)
    losses = load_loss(settings.loss)(tokens, settings, sums_N.get("policy", torch.zeros_like(tokens.num_sampled_N)))
    loss_T, added = losses.loss_T, {}
    clamped_T = is_clamped(tokens.logprobs_T, tokens.old_T)
    if settings.correction.is_active:
        correction_T = correction_weights(tokens, settings, sums_N)
        loss_T = loss_T * correction_T
        added["correction"] = correction_T
    if tokens.reference_T is not None:
        if settings.kl_place is KlPlace.loss:
            kl_T = kl(tokens.logprobs_T, tokens.reference_T, tokens.log_ratio_T, settings.kl_estimator)
            loss_T = loss_T + settings.kl_coef * kl_T
            clamped_T = clamped_T | is_clamped(tokens.logprobs_T, tokens.reference_T)
        added["kl"] = weighted_kl(tokens.logprobs_T.detach(), tokens.reference_T, tokens.engine_T)
    mask_T, zero_T = tokens.mask_T, torch.zeros_like(loss_T)
    if entropy_coef:
        loss_T = loss_T - entropy_coef * torch.where(mask_T, entropy_T, zero_T)
    weight_T = torch.where(mask_T, aggregation_weights(tokens, settings.aggregation), zero_T)
    # A masked loss may be NaN, for example of a user's loss: it is left out rather than multiplied by 0.
    losses_T = torch.where(mask_T, loss_T * weight_T, zero_T)
    loss = losses_T.sum()
    with torch.no_grad():
        by_weight = {"weight": weight_T, "clipped": torch.where(losses.clipped_T, weight_T, zero_T)}
        importance_T = tokens.drift_T.exp()
        by_token_T = {
            "tokens": torch.ones_like(loss_T),
            "clamped": clamped_T,
            "kl_old": kl_from_sampler(tokens.old_T, tokens.logprobs_T),
            "importance": importance_T,
            "importance_squared": importance_T.square(),
            **added,
        }
        reported = {name: values_T.sum() for name, values_T in by_weight.items()}
        reported |= {name: torch.where(mask_T, values_T, 0.0).sum() for name, values_T in by_token_T.items()}
        recorded_T = {
            TRAINER_LOGPROBS: batch.added_T.get(OLD_LOGPROBS, tokens.logprobs_T.detach()),
            "advantages": tokens.advantages_T,
            "ratios": tokens.log_ratio_T.exp(),
            "clipped": losses.clipped_T,
            "entropies": entropy_T.detach(),
        }
    reported["loss"] = loss.detach()
    return LossSums(loss=loss, losses_T=losses_T.detach(), reported=reported, by_token=recorded_T)


def sequence_terms(tokens: PolicyTokens, settings: AlgorithmConfig) -> dict[str, Tensor]:
    """What the objective needs summed over each whole trajectory, [T] each."""
    terms = correction_terms(tokens, settings)
    if settings.loss not in TOKEN_LOSSES:
        terms["policy"] = SEQUENCE_TERMS.get(settings.loss, log_ratio)(tokens, settings)
    return terms


def aggregation_weights(tokens: PolicyTokens, aggregation: Aggregation) -> Tensor:
    """Weight of each token in the sum over the update, float [T]."""
    if aggregation is Aggregation.trajectory:
        per_token_N = 1 / tokens.num_sampled_N.clamp(min=1).to(tokens.log_ratio_T.dtype)
        return by_token(per_token_N, tokens.trajectory_ids_T)
    return torch.ones_like(tokens.log_ratio_T)


def denominator(aggregation: Aggregation, *, num_trajectories: int, num_tokens: int, length: int) -> float:
    """What the summed loss of a whole update is divided by.

    Args:
        num_tokens: sampled tokens of the update.
        length: tokens of a trajectory at the most, which `constant` divides by.
    """
    if aggregation is Aggregation.trajectory:
        return num_trajectories
    return num_tokens if aggregation is Aggregation.token else num_trajectories * length


def cross_entropy(logprobs_T: Tensor, entropy_T: Tensor, batch: LossBatch) -> LossSums:
    """Sum of -log p over unmasked tokens; masked values may be NaN. `reported` has `loss` and `tokens`."""
    mask_T = batch.mask_T
    losses_T = -torch.where(mask_T, logprobs_T, torch.zeros_like(logprobs_T))
    loss = losses_T.sum()
    return LossSums(loss=loss, losses_T=losses_T.detach(), reported={"loss": loss.detach(), "tokens": mask_T.sum()})
