"""Whether `resync.bucket_bytes` is large enough for a model, by the rules of the recipe's transport."""

from collections.abc import Sequence
from math import prod

from slimrl.checkpoints.safetensors_file import element_bytes
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.resync import TransportName
from slimrl.data.model_weights import TensorSpec
from slimrl.resync.buckets import Transform, rows_of, too_small
from slimrl.resync.p2p.engine_plan import SLOTS


def too_few_bytes(specs: Sequence[TensorSpec], recipe: Recipe, transform: Transform | None) -> str:
    """Why `resync.bucket_bytes` is too small, and how much is enough; empty if it is not."""
    given = recipe.resync.bucket_bytes
    transport = recipe.resync.transport
    if transport not in (TransportName.ipc, TransportName.p2p):
        return too_small(specs, given, transform)
    # With `ipc`, engines on the same nodes count once, but where they are is not known yet.
    engines = most_fed_engines(recipe) if transport is TransportName.p2p else max(1, recipe.rollout.num_engines)
    parts = [part for spec in specs for part in (transform.outputs(rows_of(spec)) if transform else [rows_of(spec)])]
    widest = max((part.spec for part in parts), key=_row_bytes)
    row, name = _row_bytes(widest), widest.name
    needed = SLOTS * engines * row
    if needed <= given:
        return ""
    return (
        f"{given} bytes are too few: one row of {name} has {row}, and a trainer rank needs room for {SLOTS} of each "
        f"engine to which it sends, of which there are up to {engines}. Use {needed} or more."
    )


def most_fed_engines(recipe: Recipe) -> int:
    """Most engines to which a trainer rank sends, as engines join and leave; others are fed by engines."""
    rollout, ranks = recipe.rollout, recipe.trainer.num_ranks
    counts = range(1, rollout.most_engines + 1)
    return max((-(-count // -(-count * rollout.engine_tp // ranks)) for count in counts), default=1)


def _row_bytes(spec: TensorSpec) -> int:
    return prod(spec.shape[1:]) * element_bytes(spec.dtype)
