"""Estimates the resync of a recipe, whatever its transport."""

from collections.abc import Collection, Sequence
from typing import Any, cast

from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.resync import TransportName
from slimrl.data.model_weights import EnginePlace, SourceLayout
from slimrl.estimates.resync.estimate import NOT_ESTIMATED, Estimate, estimate
from slimrl.estimates.resync.machine import Machine
from slimrl.estimates.resync.peer_estimate import estimate_models, planned_models
from slimrl.estimates.resync.shared_estimate import estimate_shared
from slimrl.resync.buckets import Transform
from slimrl.resync.p2p.demand import sent_tensors
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
    by_messages = {TransportName.ipc: estimate_shared, TransportName.p2p: estimate_models}
    if transport in by_messages:
        quantize = cast("Quantize | None", transform)
        tensors = sent_tensors(layout, quantize)
        return by_messages[transport](
            layout,
            trainer_nodes,
            engines,
            machine,
            tensors=tensors,
            models=planned_models(tensors, hf_config, recipe.rollout),
            bucket_bytes=bucket_bytes,
            transform=quantize,
        )
    if transport is not TransportName.disk:
        raise ValueError(f"resync.transport: {NOT_ESTIMATED}")
    plan = plan_resync(layout, trainer_nodes, bucket_bytes=bucket_bytes, transform=transform)
    return estimate(plan, engines, machine, replicated=replicated)
