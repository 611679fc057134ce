"""What losses read: the tokens of one micro-batch on one rank, and sums over whole trajectories.

T tokens of this rank, N trajectories that have tokens in the micro-batch. A trajectory may reach beyond: onto other
context-parallel ranks, and into other micro-batches if it has several segments. Every loss is a sum over tokens, in
which a sum over a whole trajectory, such as the ratio of a sequence, is a value without gradient. So each token's
gradient is the same wherever the other tokens of its trajectory are.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slimrl.algorithms.loss_types import PolicyTokens
from slimrl.config.schema.algorithm import AlgorithmConfig, OldPolicy
from slimrl.data.packing import ADVANTAGES, OLD_LOGPROBS, REFERENCE_LOGPROBS

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this before exp: exp(20)^2 is within float32. Beyond it they have no gradient."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LossBatch:
    """What a loss reads of a micro-batch: T tokens of this rank, N trajectories. Fields as in MicroBatch."""

    mask_T: Tensor
    trajectory_ids_T: Tensor
    rollout_logprobs_T: Tensor
    added_T: dict[str, Tensor]
    num_sampled_N: Tensor
    advantages_N: Tensor
    remote_N: dict[str, Tensor]
    sum_over_ranks: Callable[[Tensor], Tensor] | None
    """Function that adds a tensor over the context-parallel ranks; None if this rank holds all tokens"""


def policy_tokens(logprobs_T: Tensor, batch: LossBatch, settings: AlgorithmConfig) -> PolicyTokens:
    """The values that losses read. Without a pass for them, the old log-probs are the current ones: before an update
    the policy is the old one.

    Raises:
        ValueError: the token tensors differ in length.
    """
    mask_T = batch.mask_T
    lengths = {len(logprobs_T), len(mask_T), len(batch.trajectory_ids_T), *map(len, batch.added_T.values())}
    if len(lengths) != 1:
        raise ValueError(f"token tensors of different lengths: {sorted(lengths)}")

    def sampled(values_T: Tensor) -> Tensor:
        return torch.where(mask_T, values_T, torch.zeros_like(values_T))

    now_T, engine_T = sampled(logprobs_T), sampled(batch.rollout_logprobs_T)
    trainer_T = sampled(batch.added_T[OLD_LOGPROBS]) if OLD_LOGPROBS in batch.added_T else now_T.detach()
    old_T = engine_T if settings.old_policy is OldPolicy.rollout else trainer_T
    advantages_T = batch.added_T.get(ADVANTAGES)
    if advantages_T is None:
        advantages_T = by_token(batch.advantages_N, batch.trajectory_ids_T)
    reference_T = batch.added_T.get(REFERENCE_LOGPROBS)
    return PolicyTokens(
        mask_T=mask_T,
        trajectory_ids_T=batch.trajectory_ids_T,
        logprobs_T=now_T,
        old_T=old_T,
        engine_T=engine_T,
        log_ratio_T=(now_T - old_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO),
        engine_gap_T=(trainer_T - engine_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO),
        drift_T=(now_T.detach() - engine_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO),
        reference_T=None if reference_T is None else sampled(reference_T),
        advantages_T=sampled(advantages_T),
        num_sampled_N=batch.num_sampled_N,
    )


def is_clamped(logprobs_T: Tensor, other_T: Tensor) -> Tensor:
    """Whether a token's log-ratio is beyond what it is clamped to, bool [T]."""
    return (logprobs_T - other_T).abs() > MAX_LOG_RATIO


def by_token(values_N: Tensor, trajectory_ids_T: Tensor) -> Tensor:
    """Value of each token's trajectory, [T]. A micro-batch of padding alone has no trajectory: zeros."""
    if not len(values_N):
        return torch.zeros(len(trajectory_ids_T), dtype=values_N.dtype, device=trajectory_ids_T.device)
    return values_N[trajectory_ids_T]


def sum_by_trajectory(values_T: Tensor, trajectory_ids_T: Tensor, num_trajectories: int) -> Tensor:
    """Sum of each trajectory's values, [N]. Padding has the id of trajectory 0 and values of 0."""
    sums = values_T.new_zeros(max(num_trajectories, 1))
    return sums.index_add(0, trajectory_ids_T, values_T)[:num_trajectories]


def whole_sums(terms: dict[str, Tensor], batch: LossBatch) -> dict[str, Tensor]:
    """Sum of each term [T] over each whole trajectory, [N] without gradient."""
    return {name: _whole_sum(name, values_T.detach(), batch) for name, values_T in terms.items()}


def _whole_sum(name: str, values_T: Tensor, batch: LossBatch) -> Tensor:
    sums_N = sum_by_trajectory(values_T, batch.trajectory_ids_T, len(batch.num_sampled_N))
    if batch.sum_over_ranks is not None:
        sums_N = batch.sum_over_ranks(sums_N)
    return sums_N + batch.remote_N[name].to(sums_N.dtype) if name in batch.remote_N else sums_N
