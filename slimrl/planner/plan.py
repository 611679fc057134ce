"""The whole plan of a recipe: parameters, memory, time and resync, and its form as JSON.

1. The recipe passes all rules of its settings; its model's config.json may be a published one.
2. One rank of each pipeline stage is built on the meta device, and its parameters counted.
3. Memory, work and communication follow from formulas, each with its source in its module.
4. The resync planner gives the bytes and seconds of a new version.
"""

import gc
from dataclasses import asdict, dataclass, replace
from typing import Any

from slimrl.config.devices import shares_devices
from slimrl.config.schema import Recipe, TransportName
from slimrl.planner.engine import GIB
from slimrl.planner.facts import Facts, model_facts, with_engines
from slimrl.planner.hardware import Hardware
from slimrl.planner.layout_plan import LayoutPlan, plan_layout
from slimrl.planner.memory import host_bytes_per_node
from slimrl.planner.parameters import built_stages, layout_fields, stage_total
from slimrl.planner.recipe import Planned
from slimrl.resync.estimate.estimate import ESTIMATED, Estimate, estimate
from slimrl.resync.plan import ResyncPlan, plan_resync
from slimrl.runtime.resync_estimate import Cluster, planned_cluster
from slimrl.trainer.build import transformer_config
from slimrl.trainer.source_layout import layers_of_stages, source_layout


@dataclass(frozen=True, kw_only=True)
class Plan:
    planned: Planned
    hardware: Hardware
    facts: Facts
    cluster: Cluster
    layout: LayoutPlan
    resync: Estimate | None
    """None with `slimrl sft`"""
    notes: list[str]
    """What the figures take for granted beyond the formulas"""

    @property
    def step_s(self) -> float:
        """All of a step: the shortest rollout that can be, log-probs, updates, and the resync."""
        return self.layout.step_s + (self.resync.seconds if self.resync else 0.0)


def make_plan(planned: Planned, hardware: Hardware, *, mean_tokens: int | None = None) -> Plan:
    """Garbage collection pauses meanwhile: of a large model it would walk through a million planned parts again and
    again.

    Args:
        mean_tokens: length of a trajectory or conversation; None for the longest that the recipe allows.

    Raises:
        ValueError: the layout cannot be.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        return _make_plan(planned, hardware, mean_tokens)
    finally:
        if collecting:
            gc.enable()


def _make_plan(planned: Planned, hardware: Hardware, mean_tokens: int | None) -> Plan:
    recipe, known, resync = planned.recipe, model_facts(planned), None
    cluster = planned_cluster(recipe, hardware.gpus_per_node, with_engines=not planned.sft)
    if not planned.sft:
        version = plan_version(recipe, known, cluster)
        known = with_engines(known, recipe, version.buckets, hardware)
        resync = estimate(
            version,
            cluster.engines,
            hardware.links,
            transport=_transport(recipe),
            replicated=known.replicated,
        )
    uneven = replace(recipe.trainer, megatron=layout_fields(recipe.trainer.megatron))
    layers = layers_of_stages(transformer_config(uneven, known.model))
    stages = built_stages(recipe.trainer, known.model)
    layout = plan_layout(known, recipe, stages, layers, hardware, sft=planned.sft, mean_tokens=mean_tokens)
    return Plan(
        planned=planned,
        hardware=hardware,
        facts=known,
        cluster=cluster,
        layout=layout,
        resync=resync,
        notes=_notes(planned, mean_tokens),
    )


def plan_version(recipe: Recipe, known: Facts, cluster: Cluster) -> ResyncPlan:
    """The resync of one version; `delta` is planned as a whole version through the disk."""
    return plan_resync(
        source_layout(known.hf_config, recipe.trainer),
        cluster.nodes,
        cluster.engines,
        transport=_transport(recipe),
        bucket_bytes=recipe.resync.bucket_bytes,
        transform=known.transform,
    )


def _transport(recipe: Recipe) -> TransportName:
    return recipe.resync.transport if recipe.resync.transport in ESTIMATED else TransportName.disk


def as_json(plan: Plan) -> dict[str, Any]:
    """Sizes in GiB, times in seconds; memory is that of the stage that needs most, and of an engine's GPU.

    `work` and `step` are of a whole step, both communications of one of its updates.
    """
    layout, known = plan.layout, plan.facts
    worst = layout.memory[layout.worst]
    engine = known.engine
    engine_parts = {"engine_weights": engine.weights / GIB, "kv_cache": engine.kv_cache / GIB} if engine else {}
    totals = [stage_total(stage) for stage in layout.stages]
    return {
        "model": plan.planned.model,
        "world_size": plan.planned.recipe.trainer.num_ranks,
        "gpus": plan.cluster.gpus,
        "nodes": plan.cluster.num_nodes,
        "layout": asdict(plan.planned.recipe.trainer.parallel),
        "parameters": {
            "total": known.parameters.total,
            "active": known.parameters.active,
            "per_rank_min": min(totals),
            "per_rank_max": max(totals),
            "per_stage": totals,
        },
        "memory_gib": {
            **{name: nbytes / GIB for name, nbytes in worst.parts.items()},
            **engine_parts,
            "total": layout.most_bytes / GIB,
            "limit": plan.hardware.gpu_memory_gib,
            "host": worst.host / GIB,
            "host_of_node": host_bytes_per_node(plan.planned.recipe, layout.memory, plan.hardware) / GIB,
            "stage": layout.worst,
            "phases": {name: nbytes / GIB for name, nbytes in worst.phases.items()},
            "engine_gpu": None if layout.engine_gpu is None else layout.engine_gpu / GIB,
        },
        "fits": layout.fits,
        "problems": layout.problems,
        "kv_cache_tokens": engine.kv_tokens if engine else None,
        "concurrent_trajectories": engine.trajectories if engine else None,
        "batch": asdict(layout.batch),
        "pipeline_bubble": layout.work.bubble,
        "work": asdict(layout.work),
        "updates": layout.updates,
        "update_communication": asdict(layout.communication),
        "logprob_communication": asdict(layout.logprobs) if layout.logprobs else None,
        "step": _step_seconds(plan),
        "step_seconds": plan.step_s,
        "resync": None
        if plan.resync is None
        else {"bytes": plan.resync.sent_bytes, "seconds": plan.resync.seconds, "links": plan.resync.link_bytes},
        "hardware": asdict(plan.hardware),
        "notes": plan.notes,
    }


def _step_seconds(plan: Plan) -> dict[str, float]:
    """What a step's time is made of, one after the other."""
    layout = plan.layout
    return {
        "rollout_at_least": layout.work.rollout_at_least_s,
        "logprobs": layout.work.logprob_s,
        "training": layout.work.training_s,
        "communication": layout.communication_s,
        "host_optimizer": layout.updates * layout.host_update_s,
        "resync": plan.resync.seconds if plan.resync else 0.0,
    }


def _notes(planned: Planned, mean_tokens: int | None) -> list[str]:
    recipe = planned.recipe
    notes = []
    if mean_tokens is None:
        notes.append(
            f"all sequences have the longest length, {planned.longest_tokens:,} tokens; --mean-tokens tells another"
        )
    if recipe.trainer.megatron.get("fp8"):
        notes.append("FP8 training is planned with the memory and the peak of bf16, an upper bound of both")
    if not planned.sft and shares_devices(recipe) and not recipe.rollout.colocated:
        notes.append(
            "resync.transport ipc puts engines on the trainer's GPUs, where with rollout.colocated: false both keep "
            "all of their memory"
        )
    if not planned.sft and recipe.resync.transport not in ESTIMATED:
        notes.append("the resync is a whole version through the disk; a delta is smaller by what did not change")
    return notes
