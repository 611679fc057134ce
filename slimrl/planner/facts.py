"""What holds of a recipe's model and engines whatever layout its trainer has."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from slimrl.config.schema import Precision, Recipe
from slimrl.models.family import family_of
from slimrl.models.megatron_config import MegatronModelConfig
from slimrl.models.weight_map import WeightMap
from slimrl.planner.engine import GIB, EnginePlan, plan_engine
from slimrl.planner.hardware import Hardware
from slimrl.planner.parameters import ModelParameters, ParameterTable, model_parameters
from slimrl.planner.recipe import Planned
from slimrl.planner.shape import Shape
from slimrl.resync.buckets import PlannedBucket, Transform, cut_buckets
from slimrl.resync.pipeline import NUM_SLOTS
from slimrl.resync.transform import quantize_transform
from slimrl.runtime.resync_estimate import replicated_names


@dataclass(frozen=True, kw_only=True)
class Facts:
    hf_config: dict[str, Any]
    model: MegatronModelConfig
    weight_map: WeightMap
    shape: Shape
    parameters: ModelParameters
    table: ParameterTable
    transform: Transform | None
    """What engines of a quantised checkpoint get"""
    replicated: frozenset[str]
    """Names of tensors that every rank of an engine holds whole"""
    slot_bytes: int = 0
    """Of a resync, on a rank that sends; 0 with `slimrl sft`"""
    engine: EnginePlan | None = None
    """None with `slimrl sft`"""


def model_facts(planned: Planned) -> Facts:
    """What follows from the model alone. Raises ValueError for a model that is not supported."""
    hf_config = planned.hf_config
    family = family_of(hf_config)
    model, weight_map = family.megatron_config(hf_config), family.weight_map(hf_config)
    shape = Shape.of(model)
    return Facts(
        hf_config=hf_config,
        model=model,
        weight_map=weight_map,
        shape=shape,
        parameters=model_parameters(weight_map, topk=shape.topk),
        table=ParameterTable(weight_map),
        transform=None if planned.sft else quantize_transform(hf_config, weight_map, fp8_engines=True),
        replicated=replicated_names(weight_map),
    )


def buckets_of(known: Facts, recipe: Recipe) -> Sequence[PlannedBucket]:
    """Those of a resync, which are the same for every layout."""
    dtype = "bfloat16" if recipe.trainer.precision is Precision.bf16 else "float32"
    return cut_buckets(known.weight_map.specs(dtype), recipe.resync.bucket_bytes, known.transform)


def with_engines(known: Facts, recipe: Recipe, buckets: Sequence[PlannedBucket], hardware: Hardware) -> Facts:
    """The facts with what engines hold and a resync takes."""
    sent = max(bucket.sent.nbytes for bucket in buckets)
    stage = max(bucket.gathered.nbytes for bucket in buckets) if known.transform is not None else 0
    engine = plan_engine(
        recipe,
        known.shape,
        (part for bucket in buckets for part in bucket.sent.parts),
        known.replicated,
        gpu_bytes=round(hardware.gpu_memory_gib * GIB),
        reserve_bytes=round(hardware.reserve_gib * GIB),
    )
    return replace(known, slot_bytes=stage + NUM_SLOTS * sent, engine=engine)
