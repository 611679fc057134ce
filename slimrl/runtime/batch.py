"""From scored trajectories to packed update batches, and what their log-probs say.

1. Failed trajectories, groups that a filter refuses and (by option) groups of equal rewards are left out.
2. Every trajectory gets its advantage within its group.
3. The groups are dealt to the updates of this rollout, and each update's trajectories are packed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from slimrl.algorithms.advantages import group_advantages, groups_of, zero_variance_groups
from slimrl.algorithms.kl import k3
from slimrl.config.schema import Recipe, TruncatedRule
from slimrl.data.packing import MicroBatch, pack, trajectory_sequences
from slimrl.data.training import Layout, LogProbs
from slimrl.data.trajectory import Status, Trajectory
from slimrl.runtime.errors import RunError
from slimrl.runtime.routing import RoutingComparison, compare_routing, routing_metrics
from slimrl.runtime.task import GroupFilter


@dataclass(kw_only=True, eq=False)
class UpdateBatch:
    """What one optimizer update learns from."""

    parts: list[list[MicroBatch]]
    """Micro-batches by data-parallel rank."""
    num_trajectories: int
    entropy_sum: float = 0.0
    """Of the policy at the sampled tokens, filled with the old log-probs."""
    routing: list[RoutingComparison] = field(default_factory=list)
    """Of each micro-batch in order, filled with the old log-probs where engines and trainer both report routing."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The trajectories of a rollout that are trained on."""

    trajectories: list[Trajectory]
    advantages: np.ndarray
    """float32, one per trajectory."""
    zero_variance_fraction: float
    """Of the groups that have two or more scored trajectories."""


def apply_truncation_rule(trajectories: Sequence[Trajectory], rule: TruncatedRule) -> None:
    """Takes what truncated and aborted trajectories earned where the rule says so: more than 0 becomes 0.

    A penalty stays, for with 0 in its place a trajectory would gain by not coming to an end.
    """
    if rule is TruncatedRule.zero:
        for trajectory in trajectories:
            if trajectory.status in (Status.truncated, Status.aborted):
                trajectory.reward = min(0.0, trajectory.reward)


def select(trajectories: Sequence[Trajectory], recipe: Recipe, filters: Sequence[GroupFilter]) -> Selection:
    """Trajectories to train on with their advantages, in order.

    Raises:
        RunError: a group filter failed; it is named.
    """
    algorithm = recipe.algorithm
    scored = [t for t in trajectories if t.status is not Status.failed]
    members = groups_of([t.group_id for t in scored])
    usable = {g for g, indices in members.items() if len(indices) > 1}
    for name, keep in zip(recipe.reward.group_filters, filters, strict=True):
        usable = {g for g in usable if _keeps(name, keep, [scored[i] for i in members[g]])}
    scored = [t for t in scored if t.group_id in usable]
    ids, rewards = [t.group_id for t in scored], [t.reward for t in scored]
    equal = zero_variance_groups(rewards, ids)
    advantages = group_advantages(rewards, ids, algorithm.advantage.value)
    chosen = [
        index
        for index, trajectory in enumerate(scored)
        if trajectory.num_sampled_tokens
        and not (algorithm.skip_zero_variance and trajectory.group_id in equal)
        and not (algorithm.truncated is TruncatedRule.mask and trajectory.status is not Status.completed)
    ]
    return Selection(
        trajectories=[scored[i] for i in chosen],
        advantages=advantages[chosen],
        zero_variance_fraction=len(equal) / len(usable) if usable else 0.0,
    )


def _keeps(name: str, keep: GroupFilter, group: list[Trajectory]) -> bool:
    try:
        return keep(group)
    except Exception as error:
        # Whatever a task's own code raises is named as its fault; the driver's log has the rest.
        raise RunError(f"{name} failed on {group[0].group_id}: {type(error).__name__}: {error}") from error


def make_updates(selection: Selection, recipe: Recipe, layout: Layout) -> list[UpdateBatch]:
    """The update batches of one rollout: groups dealt in turn, fewer updates where there are fewer groups."""
    groups = groups_of([t.group_id for t in selection.trajectories])
    count = min(recipe.trainer.updates_per_rollout, len(groups))
    shares: list[list[int]] = [[] for _ in range(count)]
    for number, members in enumerate(groups.values()):
        shares[number % count] += members
    updates = []
    for share in shares:
        trajectories = [selection.trajectories[i] for i in share]
        parts = pack(
            trajectory_sequences(trajectories),
            selection.advantages[share],
            budget_tokens=recipe.trainer.max_tokens_per_rank * recipe.trainer.parallel.context,
            alignment=layout.alignment,
            data_parallel=layout.data,
            micro_batch_multiple=layout.micro_batch_multiple,
        )
        updates.append(UpdateBatch(parts=parts, num_trajectories=len(trajectories)))
    return updates


def fill_old_logprobs(update: UpdateBatch, results: list[list[LogProbs]]) -> None:
    """Puts the log-probs of the policy before this rollout's updates into the micro-batches, and compares routing."""
    for batch, result in _pairs(update, results):
        batch.old_logprobs = result.logprobs
        update.entropy_sum += float(np.sum(result.entropy, where=batch.mask, dtype=np.float64))
        if batch.routed_experts is not None and result.routed_experts is not None:
            assert result.routing_margin is not None, "experts come with their margins"
            update.routing.append(
                compare_routing(batch.routed_experts, result.routed_experts, result.routing_margin, batch.cu_seqlens)
            )


def fill_elsewhere(update: UpdateBatch, current: list[list[LogProbs]]) -> None:
    """For trajectories whose segments lie in several micro-batches: what the others add to their log ratio."""
    totals = np.zeros(update.num_trajectories, np.float64)
    local: list[np.ndarray] = []
    for batch, result in _pairs(update, current):
        difference = np.where(batch.mask, result.logprobs - batch.old_logprobs, 0).astype(np.float64)
        here = np.bincount(batch.trajectory_ids, difference, minlength=len(batch.trajectories))
        local.append(here[: len(batch.trajectories)])
        totals[batch.trajectories] += local[-1]
    for (batch, _), here in zip(_pairs(update, current), local, strict=True):
        batch.elsewhere_log_ratio = (totals[batch.trajectories] - here).astype(np.float32)


def mismatch_metrics(updates: Sequence[UpdateBatch]) -> dict[str, float]:
    """How far the trainer's log-probs of the sampled tokens are from the engine's.

    `mismatch/kl_k3` estimates KL(engine, trainer), since the tokens are the engine's.
    """
    batches = [m for update in updates for part in update.parts for m in part]
    rollout = np.concatenate([m.rollout_logprobs[m.mask] for m in batches])
    trainer = np.concatenate([m.old_logprobs[m.mask] for m in batches if m.old_logprobs is not None])
    difference = np.abs(trainer.astype(np.float64) - rollout)
    metrics = {
        "mismatch/logprob_abs_mean": float(difference.mean()),
        "mismatch/logprob_abs_max": float(difference.max()),
        "mismatch/kl_k3": float(k3(rollout, trainer).mean()),
    }
    routing = [comparison for update in updates for comparison in update.routing]
    if routing:
        reached = np.concatenate([c.reached_T[m.mask] for c, m in zip(routing, batches, strict=True)])
        metrics |= routing_metrics(routing, reached, difference)
    return metrics


def num_sampled_tokens(update: UpdateBatch) -> int:
    return sum(int(batch.mask.sum()) for part in update.parts for batch in part)


def _pairs(update: UpdateBatch, results: list[list[LogProbs]]) -> list[tuple[MicroBatch, LogProbs]]:
    return [
        (batch, result)
        for part, part_results in zip(update.parts, results, strict=True)
        for batch, result in zip(part, part_results, strict=True)
    ]
