"""Estimates the resync of a recipe, whatever its transport."""

from collections.abc import Collection, Sequence
from typing import Any, cast

from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.resync import TransportName
from slimrl.data.model_weights import EnginePlace, SourceLayout
from slimrl.estimates.resync.estimate import NOT_ESTIMATED, Estimate, estimate
from slimrl.estimates.resync.machine import Machine
from slimrl.estimates.resync.peer_estimate import estimate_peers
from slimrl.resync.buckets import Transform
from slimrl.resync.plan import plan_resync
from slimrl.resync.transform import Quantize


def estimate_version(
    recipe: Recipe,
    hf_config: dict[str, Any],
    layout: SourceLayout,
    trainer_nodes: Sequence[str],
    engines: Sequence[EnginePlace],
    machine: Machine,
    *,
    transport: TransportName,
    transform: Transform | None,
    replicated: Collection[str],
) -> Estimate:
    """Bytes and seconds of one version.

    Args:
        transport: in place of the recipe's.
        replicated: tensors, by the name under which they are sent, that every rank of an engine holds whole.

    Raises:
        ValueError: the transport is none of ESTIMATED, or `resync.bucket_bytes` is too small.
    """
    bucket_bytes = recipe.resync.bucket_bytes
    if transport is TransportName.p2p:
        return estimate_peers(
            layout,
            trainer_nodes,
            engines,
            machine,
            hf_config=hf_config,
            rollout=recipe.rollout,
            bucket_bytes=bucket_bytes,
            transform=cast("Quantize | None", transform),
        )
    if transport is not TransportName.disk:
        raise ValueError(f"resync.transport: {NOT_ESTIMATED}")
    plan = plan_resync(layout, trainer_nodes, bucket_bytes=bucket_bytes, transform=transform)
    return estimate(plan, engines, machine, replicated=replicated)
