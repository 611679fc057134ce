"""Facts about a recipe's model and engines that do not depend on the trainer's layout."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from slimrl.config.lora_rules import adapter_targets
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.resync import TransportName
from slimrl.config.speculative_rules import sends_drafts
from slimrl.estimates.planner.engine import GIB, EnginePlan, plan_engine
from slimrl.estimates.planner.hardware import Hardware
from slimrl.estimates.planner.parameters import ModelParameters, ParameterTable, model_parameters
from slimrl.estimates.planner.shape import Shape
from slimrl.estimates.resync.command import replicated_names
from slimrl.models.adapters import adapter_map
from slimrl.models.family import family_of
from slimrl.models.megatron_config import MegatronModelConfig
from slimrl.models.offline_recipe import OfflineRecipe
from slimrl.models.weight_map import WeightMap
from slimrl.resync.bucket_size import too_few_bytes
from slimrl.resync.buckets import Bucket, Transform, cut_buckets
from slimrl.resync.pipeline import NUM_SLOTS
from slimrl.resync.transform import quantize_transform


@dataclass(frozen=True, kw_only=True)
class Facts:
    hf_config: dict[str, Any]
    model: MegatronModelConfig
    weight_map: WeightMap
    shape: Shape
    parameters: ModelParameters
    table: ParameterTable
    transform: Transform | None
    """The transform for engines of a quantised checkpoint; None for others"""
    sent: WeightMap
    """The weights that a resync sends"""
    replicated: frozenset[str]
    """Names of tensors that every rank of an engine holds whole"""
    adapters: ParameterTable | None = None
    """Parameters of the adapters; None if the model's own weights are trained"""
    slot_bytes: int = 0
    """Most bytes of the resync buffers of a sending rank; 0 with `slimrl sft`"""
    engine: EnginePlan | None = None
    """Plan of an engine; None with `slimrl sft`"""


def model_facts(planned: OfflineRecipe) -> Facts:
    """Facts that follow from the model alone. Raises ValueError for an unsupported model."""
    hf_config = planned.hf_config
    family = family_of(hf_config)
    model, weight_map = family.megatron_config(hf_config), family.weight_map(hf_config)
    shape, lora = Shape.of(model), planned.recipe.trainer.lora
    adapters = adapter_map(weight_map, adapter_targets(lora, hf_config), lora.rank)
    sent = family.weight_map(hf_config, mtp=sends_drafts(planned.recipe)).without_copies()
    trained = family.weight_map(hf_config, mtp=planned.recipe.trainer.mtp.train)
    return Facts(
        hf_config=hf_config,
        model=model,
        weight_map=weight_map,
        shape=shape,
        parameters=model_parameters(weight_map, model),
        table=ParameterTable(trained),
        adapters=ParameterTable(adapters) if lora.rank else None,
        transform=None if planned.sft else quantize_transform(hf_config, sent, fp8_engines=True),
        sent=sent,
        replicated=replicated_names(sent),
    )


BY_MESSAGES = {TransportName.ipc: 2, TransportName.p2p: 1}
"""Transports without buckets, and how often a GPU needs room for `resync.bucket_bytes`"""


def buckets_of(known: Facts, recipe: Recipe) -> Sequence[Bucket]:
    """A resync's buckets, which are the same for every layout; `ipc` and `p2p` cut none, so all is in one.

    Raises:
        ValueError: `resync.bucket_bytes` is too small.
    """
    specs = known.sent.specs(recipe.trainer.precision.dtype)
    if reason := too_few_bytes(specs, recipe, known.transform):
        raise ValueError(f"resync.bucket_bytes: {reason}")
    limit = sys.maxsize if recipe.resync.transport in BY_MESSAGES else recipe.resync.bucket_bytes
    return cut_buckets(specs, limit, known.transform)


def with_engines(known: Facts, recipe: Recipe, buckets: Sequence[Bucket], hardware: Hardware) -> Facts:
    """The facts with `slot_bytes` and `engine`."""
    sent = max(bucket.sent_bytes for bucket in buckets)
    stage = max(bucket.gathered_bytes for bucket in buckets) if known.transform is not None else 0
    engine = plan_engine(
        recipe,
        known.shape,
        (part for bucket in buckets for part in bucket.sent),
        known.replicated,
        gpu_bytes=round(hardware.gpu_memory_gib * GIB),
        reserve_bytes=round(hardware.reserve_gib * GIB),
    )
    # With `p2p` the buffers of a trainer rank for all engines together, and those of a rank of an engine. With `ipc`
    # the slots of a receiver, and what it stages for other nodes.
    slot_bytes = stage + NUM_SLOTS * sent
    if (count := BY_MESSAGES.get(recipe.resync.transport)) is not None:
        slot_bytes = count * min(sent, recipe.resync.bucket_bytes)
    return replace(known, slot_bytes=slot_bytes, engine=engine)
