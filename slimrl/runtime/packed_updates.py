"""The selected trajectories of a rollout as its optimizer updates, packed for the ranks."""

from dataclasses import dataclass

from slimrl.algorithms.passes import skips_zero_variance
from slimrl.algorithms.selection import Selection, deal
from slimrl.config.schema.recipe import Recipe
from slimrl.data.packing import PackedBatch, pack_for
from slimrl.data.training import Layout
from slimrl.data.trajectory import Segment, Trajectory


@dataclass(frozen=True, kw_only=True, eq=False)
class Update:
    """The data of one optimizer update."""

    batch: PackedBatch
    """Packed trajectories that the update's passes need"""
    segments: list[Segment]
    """Their segments, by the numbers of the batch's sequences"""
    trajectories: list[Trajectory]
    """The trajectory of each of these segments"""
    num_trajectories: int
    """Number of trajectories of the update, those without a pass included"""
    num_tokens: int
    """Number of sampled tokens of these trajectories"""


def make_updates(selection: Selection, recipe: Recipe, layout: Layout) -> list[Update]:
    """The optimizer updates of a rollout, without those whose gradient would be 0."""
    trajectories, by_turn, updates = selection.trajectories, selection.turn_advantages, []
    skips = skips_zero_variance(recipe)
    for chosen in deal(selection, recipe.trainer.updates_per_rollout):
        needed = [i for i in chosen if not (skips and selection.zero_variance[i])]
        if not needed:
            continue
        batch = pack_for(
            recipe.trainer,
            layout,
            [trajectories[i].segments for i in needed],
            selection.advantages[needed],
            None if by_turn is None else [by_turn[i] for i in needed],
        )
        num_tokens = sum(int(segment.loss_mask[1:].sum()) for i in chosen for segment in trajectories[i].segments)
        updates.append(
            Update(
                batch=batch,
                segments=[segment for i in needed for segment in trajectories[i].segments],
                trajectories=[trajectories[i] for i in needed for _ in trajectories[i].segments],
                num_trajectories=len(chosen),
                num_tokens=num_tokens,
            )
        )
    return updates
