"""The plan of a recipe: parameters, memory, time and resync, and its JSON.

1. The recipe passes all rules; its model's config.json may be a published one.
2. One rank of each pipeline stage is built on the meta device, and its parameters are counted.
3. Memory, work and communication follow from formulas; their modules name the sources.
4. The resync planner gives the bytes and seconds of a resync.
"""

from dataclasses import asdict, dataclass
from typing import Any

from slimrl.base.collecting import uncollected
from slimrl.checkpoints.safetensors_file import spec_bytes
from slimrl.config.schema.credit import RefillMode
from slimrl.config.schema.precision import Fp8Scaling
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.resync import TransportName
from slimrl.config.schema.trainer import ParallelConfig
from slimrl.config.speculative_rules import sends_drafts
from slimrl.config.wrapper import wrapper_of
from slimrl.estimates.planner.critic import plan_critic
from slimrl.estimates.planner.engine import GIB
from slimrl.estimates.planner.facts import Facts, buckets_of, model_facts, with_engines
from slimrl.estimates.planner.generation import sampled_prompts
from slimrl.estimates.planner.hardware import GB, Hardware
from slimrl.estimates.planner.layout_plan import LayoutPlan, plan_layout
from slimrl.estimates.planner.memory import copies_per_node, host_bytes_per_node, save_bytes_per_node
from slimrl.estimates.planner.parameters import built_stages, stage_total
from slimrl.estimates.planner.restart import Restart, plan_restart
from slimrl.estimates.planner.schedule import longest_tokens
from slimrl.estimates.planner.teacher import TeacherPlan, plan_teacher
from slimrl.estimates.resync.command import Cluster, planned_cluster
from slimrl.estimates.resync.estimate import ESTIMATED, Estimate
from slimrl.estimates.resync.version_estimate import estimate_version
from slimrl.models.draft import draft_specs
from slimrl.models.megatron_config import MegatronModelConfig
from slimrl.models.offline_recipe import OfflineRecipe
from slimrl.trainer.layout.source_layout import planned_stages, source_layout


@dataclass(frozen=True, kw_only=True)
class Plan:
    planned: OfflineRecipe
    hardware: Hardware
    facts: Facts
    cluster: Cluster
    layout: LayoutPlan
    resync: Estimate | None
    """Estimate of a resync; None with `slimrl sft`"""
    restart: Restart
    notes: list[str]
    """Assumptions beyond the formulas, as sentences"""
    teacher: TeacherPlan | None = None
    """Plan of the teacher; None without a teacher of the run's own, or if its model is not known"""
    critic: LayoutPlan | None = None
    """Plan of the critic's ranks; None without a critic"""

    @property
    def problems(self) -> list[str]:
        """Reasons why the recipe does not fit."""
        return [problem for part in (self.layout, self.teacher, self.critic) if part for problem in part.problems]

    @property
    def step_s(self) -> float:
        """Seconds of the shortest possible rollout, log-probs and updates, and of the resync, in which engines and
        trainer wait."""
        return self.layout.step_s + (self.resync.seconds if self.resync else 0.0)


def make_plan(planned: OfflineRecipe, hardware: Hardware, *, mean_tokens: int | None = None) -> Plan:
    """Pauses garbage collection, which would repeatedly walk the million planned parts of a large model.

    Raises:
        ValueError: the layout is impossible.
    """
    with uncollected():
        return _make_plan(planned, hardware, mean_tokens)


def _make_plan(planned: OfflineRecipe, hardware: Hardware, mean_tokens: int | None) -> Plan:
    recipe, known, resync = planned.recipe, model_facts(planned), None
    cluster = planned_cluster(recipe, hardware.gpus_per_node, with_engines=not planned.sft)
    if not planned.sft:
        transport = _transport(recipe)
        known = with_engines(known, recipe, buckets_of(known, recipe), hardware)
        resync = estimate_version(
            recipe,
            known.hf_config,
            source_layout(known.hf_config, recipe.trainer, mtp=sends_drafts(recipe)),
            cluster.nodes,
            cluster.engines,
            hardware.links,
            transport=transport,
            transform=known.transform,
            replicated=known.replicated,
        )
    notes = [*_notes(planned, mean_tokens), *_draft_notes(planned), *_model_notes(planned, known.model)]
    teacher = _teacher(planned, hardware, notes)
    if recipe.past_engines and not planned.sft:
        notes.append("the time of the turns of older versions is not planned")
    critic = plan_critic(planned, hardware, mean_tokens=mean_tokens)
    if critic is not None:
        notes.append("the time of the critic's passes and updates is not planned")
    layers = planned_stages(recipe.trainer, known.model)
    stages = built_stages(recipe.trainer, known.model)
    layout = plan_layout(known, recipe, stages, layers, hardware, sft=planned.sft, mean_tokens=mean_tokens)
    resync_s, adapters = 0.0 if resync is None else resync.seconds, None
    if known.adapters is not None:
        (stage,) = known.adapters.stages(ParallelConfig(), [range(known.shape.layers)])
        adapters = stage_total(stage)
    restart = plan_restart(
        recipe,
        known.parameters.total,
        adapters,
        hardware,
        step_s=layout.step_s + resync_s,
        sent_bytes=0 if resync is None else resync.sent_bytes,
        resync_s=resync_s,
    )
    return Plan(
        planned=planned,
        hardware=hardware,
        facts=known,
        cluster=cluster,
        layout=layout,
        resync=resync,
        restart=restart,
        teacher=teacher,
        critic=critic,
        notes=notes,
    )


def _teacher(planned: OfflineRecipe, hardware: Hardware, notes: list[str]) -> TeacherPlan | None:
    """Adds a note if the teacher is planned only in part."""
    given = planned.recipe.teacher
    if planned.sft or not given.is_given:
        return None
    notes.append("the time of the teacher's scores is not planned")
    try:
        plan = plan_teacher(planned, hardware)
    except ValueError as error:
        notes.append(f"the memory of the teacher is not planned: {error}")
        return None
    if plan is None and given.path:
        notes.append(f"the memory of the teacher is not planned: {given.path} is not known here")
    return plan


def _transport(recipe: Recipe) -> TransportName:
    """`delta` is planned as a whole version through the disk."""
    return recipe.resync.transport if recipe.resync.transport in ESTIMATED else TransportName.disk


def as_json(plan: Plan) -> dict[str, Any]:
    """Plan as JSON: sizes in GiB, times in seconds; memory of the stage with the highest peak, and of an engine.

    `work` and `step` are of a whole step, both communications of one update.
    """
    layout, known = plan.layout, plan.facts
    worst = layout.memory[layout.worst]
    engine = known.engine
    given = plan.planned.recipe.teacher
    engine_parts = {"engine_weights": engine.weights / GIB, "kv_cache": engine.kv_cache / GIB} if engine else {}
    totals = [stage_total(stage) for stage in layout.stages]
    return {
        "model": plan.planned.model,
        "world_size": plan.planned.recipe.trainer.num_ranks,
        "gpus": plan.cluster.gpus,
        "nodes": plan.cluster.num_nodes,
        "spare_nodes": plan.planned.recipe.trainer.spare_nodes,
        "layout": asdict(plan.planned.recipe.trainer.parallel),
        "parameters": {
            "total": known.parameters.total,
            "active": known.parameters.active,
            "per_rank_min": min(totals),
            "per_rank_max": max(totals),
            "per_stage": totals,
            **({"adapters_per_stage": list(map(stage_total, layout.adapters))} if layout.adapters else {}),
        },
        "memory_gib": {
            **{name: nbytes / GIB for name, nbytes in worst.parts.items()},
            **engine_parts,
            "total": layout.most_bytes / GIB,
            "limit": plan.hardware.gpu_memory_gib,
            "host": worst.host / GIB,
            "save_of_node": save_bytes_per_node(plan.planned.recipe, layout.memory, plan.hardware) / GIB,
            "copies_of_node": copies_per_node(plan.planned.recipe, layout.memory, plan.hardware) / GIB,
            "host_of_node": host_bytes_per_node(plan.planned.recipe, layout.memory, plan.hardware) / GIB,
            "stage": layout.worst,
            "phases": {name: nbytes / GIB for name, nbytes in worst.phases.items()},
            "engine_gpu": None if layout.engine_gpu is None else layout.engine_gpu / GIB,
        },
        "fits": not plan.problems,
        "problems": plan.problems,
        "teacher": None
        if plan.teacher is None
        else {
            "parameters": plan.teacher.parameters.total,
            "gpus": given.engines_to_start * given.engine_tp,
            "gpu_gib": plan.teacher.gpu_bytes / GIB,
            "weights_gib": plan.teacher.engine.weights / GIB,
            "kv_cache_tokens": plan.teacher.engine.kv_tokens,
        },
        "critic": None
        if plan.critic is None
        else {
            "world_size": plan.critic.recipe.trainer.num_ranks,
            "layout": asdict(plan.critic.recipe.trainer.parallel),
            "gpu_gib": plan.critic.most_bytes / GIB,
        },
        "kv_cache_tokens": engine.kv_tokens if engine else None,
        "concurrent_trajectories": engine.trajectories if engine else None,
        "batch": asdict(layout.batch),
        "pipeline_bubble": layout.work.bubble,
        "work": asdict(layout.work),
        "updates": layout.updates,
        "update_communication": asdict(layout.communication),
        "logprob_communication": asdict(layout.logprobs) if layout.logprobs else None,
        # Its parts, one after another; but where they overlap, see `overlaps`.
        "step": {
            "rollout_at_least": layout.work.rollout_at_least_s,
            "logprobs": layout.work.logprob_s,
            "training": layout.work.training_s,
            "communication": layout.communication_s,
            "host_optimizer": layout.updates * layout.host_update_s,
            "resync": plan.resync.seconds if plan.resync else 0.0,
        },
        "overlaps": layout.overlaps,
        "step_seconds": plan.step_s,
        "resync": None
        if plan.resync is None
        else {"bytes": plan.resync.sent_bytes, "seconds": plan.resync.seconds, "links": plan.resync.link_bytes},
        "restart": {
            **asdict(plan.restart),
            "in_place_s": plan.restart.in_place_s,
            "from_copy_s": plan.restart.from_copy_s,
            "new_job_s": plan.restart.new_job_s,
        },
        "hardware": asdict(plan.hardware),
        "notes": plan.notes,
    }


def _draft_notes(planned: OfflineRecipe) -> list[str]:
    """Notes on trained layers that no resync sends; see docs/models.md."""
    recipe = planned.recipe
    if planned.sft or not recipe.trainer.mtp.train or sends_drafts(recipe):
        return []
    specs = draft_specs(planned.hf_config, recipe.trainer.precision.dtype)
    nbytes = sum(map(spec_bytes, specs))
    return [
        f"the resync leaves out the {len(specs)} tensors of layers for multi-token prediction, {nbytes / GB:.2f} GB, "
        "which engines hold only with rollout.speculative.mode mtp"
    ]


def _model_notes(planned: OfflineRecipe, model: MegatronModelConfig) -> list[str]:
    """Parts of this model that a plan leaves out, or counts as other parts."""
    wrapper, notes = wrapper_of(planned.hf_config), []
    if model.sparse_attention:
        keys = "" if planned.sft else "; the indexers' keys that engines hold for each token are not counted"
        notes.append(f"sparse attention is planned as attention to all tokens, without its indexers{keys}")
    window = model.transformer.get("window_size")
    if window is not None and not planned.sft:
        notes.append(
            f"the KV cache is planned as if layers with a window of {window[0] + 1} tokens kept all of them, so it "
            "holds at least as many tokens"
        )
    if wrapper is not None:
        built = wrapper.engine_builds_tower and not planned.sft
        notes.append(
            f"the vision tower of a {wrapper.model_type} is left out"
            + (", although SGLang builds it in each engine" if built else "; nothing builds it")
        )
    return notes


def _notes(planned: OfflineRecipe, mean_tokens: int | None) -> list[str]:
    recipe = planned.recipe
    notes = []
    if mean_tokens is None:
        longest = longest_tokens(recipe, sft=planned.sft)
        notes.append(f"all sequences have the longest length, {longest:,} tokens; --mean-tokens sets another")
    if recipe.trainer.fp8 is not Fp8Scaling.off:
        notes.append("FP8 training is planned with activations and peak of bf16, so memory and time are upper bounds")
    if not planned.sft and recipe.algorithm.dynamic_sampling.refill is not RefillMode.off:
        first = "" if recipe.rollout.spans_steps else f" after the first, of {sampled_prompts(recipe):,} prompts,"
        notes.append(f"rollouts that replace zero-variance groups{first} are not planned")
    if recipe.trainer.lora.rank:
        notes.append("time and activations are planned as if all weights were trained, so both are upper bounds")
    if not planned.sft and recipe.shares_devices and not recipe.rollout.colocated:
        notes.append(
            "resync.transport ipc puts engines on the trainer's GPUs; with rollout.colocated: false both keep all of "
            "their memory"
        )
    if not planned.sft and recipe.resync.transport not in ESTIMATED:
        notes.append(
            "the resync is planned as a whole version through the disk; a delta leaves out what did not change"
        )
    return notes
