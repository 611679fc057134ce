"""The selected trajectories of a rollout as packed batches, one for each optimizer update."""

from slimrl.algorithms.selection import Selection, deal
from slimrl.config.schema.recipe import Recipe
from slimrl.data.packing import PackedBatch, pack_for
from slimrl.data.training import Layout


def make_updates(selection: Selection, recipe: Recipe, layout: Layout) -> list[PackedBatch]:
    """One packed batch for each optimizer update of a rollout."""
    trajectories, by_turn = selection.trajectories, selection.turn_advantages
    return [
        pack_for(
            recipe.trainer,
            layout,
            [trajectories[i].segments for i in chosen],
            selection.advantages[chosen],
            None if by_turn is None else [by_turn[i] for i in chosen],
        )
        for chosen in deal(trajectories, recipe.trainer.updates_per_rollout)
    ]
