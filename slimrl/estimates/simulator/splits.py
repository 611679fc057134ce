"""A recipe on other numbers of GPUs: the same split scaled, and the best split of a number of GPUs.

A split is the recipe with another `trainer.num_ranks` and `rollout.num_engines`. Its parallel layout stays, so that the
trainer grows by data parallelism.
"""

from collections.abc import Callable, Sequence
from math import gcd, prod

from slimrl.config.problems import RecipeError
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.rollout import RolloutConfig

TRIED = 8
"""Splits between two known ones that a search tries at a time"""


def scaled_split(recipe: Recipe, gpus: int, *, scale_batch: bool) -> list[str]:
    """Overrides that give trainer and engines their parts of so many GPUs.

    Args:
        scale_batch: prompts of a step grow with the GPUs.

    Raises:
        ValueError: the parts are not whole.
    """
    rollout, ranks = recipe.rollout, recipe.trainer.num_ranks
    total = ranks + rollout.num_engines * rollout.engine_tp
    if gpus * ranks % total or gpus * rollout.num_engines % total:
        unit = total // gcd(ranks, rollout.num_engines, total)
        raise ValueError(
            f"--gpus {gpus}: the recipe's {ranks} trainer ranks and {rollout.num_engines} engines of "
            f"{rollout.engine_tp} GPUs scale to multiples of {unit}"
        )
    split = split_overrides(gpus * ranks // total, gpus * rollout.num_engines // total)
    prompts = round(rollout.prompts_per_step * gpus / total)
    return [*split, f"rollout.prompts_per_step={prompts}"] if scale_batch else split


def split_overrides(ranks: int, engines: int) -> list[str]:
    return [f"trainer.num_ranks={ranks}", f"rollout.num_engines={engines}"]


def shared_overrides(recipe: Recipe, gpus: int) -> list[str]:
    """The trainer and the engines on all GPUs in turns."""
    plain = RolloutConfig()
    return [
        *split_overrides(gpus, gpus // recipe.rollout.engine_tp),
        "rollout.colocated=true",
        "resync.transport=ipc",
        f"rollout.mode={plain.mode.value}",
        f"rollout.max_staleness={plain.max_staleness}",
        f"rollout.too_old={plain.too_old.value}",
    ]


def legal_splits(recipe: Recipe, gpus: int) -> list[tuple[int, int]]:
    """(trainer ranks, engines) that use all of so many GPUs, as far as divisors tell.

    Raises:
        ValueError: there is none.
    """
    parallel, of_engine = recipe.trainer.parallel, recipe.rollout.engine_tp
    of_replica = prod((parallel.tensor, parallel.context, parallel.pipeline))
    of_experts = prod((parallel.expert, parallel.expert_tensor, parallel.pipeline))
    splits = [
        (gpus - engines * of_engine, engines)
        for engines in range(1, gpus // of_engine + 1)
        if (ranks := gpus - engines * of_engine) > 0 and ranks % of_replica == 0 and ranks % of_experts == 0
    ]
    if not splits:
        raise ValueError(
            f"--suggest {gpus}: no split into engines of {of_engine} GPUs and trainer ranks in replicas of "
            f"{max(of_replica, of_experts)}"
        )
    return splits


def best_splits[Row](
    splits: Sequence[tuple[int, int]], measure: Callable[[int, int], Row], worth: Callable[[Row], tuple[bool, float]]
) -> list[Row]:
    """The measured splits, the best first: some over the whole range, then those around the best, until it has no
    neighbour that was not tried. Splits that break a rule are left out.

    Args:
        measure: by trainer ranks and engines; RecipeError for one that breaks a rule.
        worth: the higher the better; it rises up to the best split and falls behind it.

    Raises:
        RecipeError: all that were tried break one.
    """
    rows: dict[int, Row] = {}
    first_error: RecipeError | None = None
    tried: set[int] = set()
    low, high = 0, len(splits) - 1
    while wanted := {round(low + (high - low) * part / TRIED) for part in range(TRIED + 1)} - tried:
        for place in sorted(wanted):
            tried.add(place)
            try:
                rows[place] = measure(*splits[place])
            except RecipeError as error:
                first_error = first_error or error
        if not rows:
            continue
        best = max(rows, key=lambda place: worth(rows[place]))
        low = max((place for place in tried if place < best), default=best)
        high = min((place for place in tried if place > best), default=best)
    if first_error is not None and not rows:
        raise first_error
    return sorted(rows.values(), key=worth, reverse=True)
