"""Rules of the trainer: its layout, its batches, and incompatible fields of megatron-core."""

import math
from collections.abc import Iterator

from slimrl.config.algorithms import COMPARING
from slimrl.config.alignment import round_up, sequence_alignment, tile_tokens
from slimrl.config.package_fields import DTYPES
from slimrl.config.passthrough import unused_fields
from slimrl.config.problems import Violation, fitting_text, multiples_text, suggestion
from slimrl.config.schema.precision import Precision
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.trainer import LrSchedule

RECOMPUTABLE = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")
"""Modules that megatron-core's `recompute_modules` may name."""

STATE_DTYPES = {
    "main_params_dtype": ("float32", "float16"),
    "exp_avg_dtype": DTYPES,
    "exp_avg_sq_dtype": DTYPES,
}
"""Fields of the precision-aware optimizer, the main weights first -> dtypes that Transformer Engine's Adam supports."""


def layout_violations(recipe: Recipe, experts: int) -> Iterator[Violation]:
    """Parallel sizes against the number of ranks and against each other.

    Args:
        experts: of a layer, 1 for a dense one, 0 if unknown; suggested sizes divide them.
    """
    parallel, ranks = recipe.trainer.parallel, recipe.trainer.num_ranks
    dense = parallel.tensor * parallel.pipeline * parallel.context
    expert = parallel.expert * parallel.expert_tensor * parallel.pipeline
    if ranks % dense:
        yield (
            "trainer.num_ranks",
            f"{ranks} is not a multiple of tensor {parallel.tensor} x pipeline {parallel.pipeline} x context "
            f"{parallel.context} = {dense}." + multiples_text(math.lcm(dense, expert), ranks),
        )
    elif ranks % expert:
        yield (
            "trainer.parallel.expert",
            f"expert {parallel.expert} x expert_tensor {parallel.expert_tensor} x pipeline {parallel.pipeline} = "
            f"{expert} does not divide trainer.num_ranks {ranks}." + _expert_text(recipe, experts),
        )
    if recipe.trainer.megatron.get("moe_token_dispatcher_type") == "allgather" and parallel.expert > 1:
        yield (
            "trainer.megatron.moe_token_dispatcher_type",
            "allgather needs equally many tokens on every expert-parallel rank, and packed micro-batches differ in "
            "length. Use alltoall.",
        )
    if parallel.sequence and parallel.tensor == 1:
        yield "trainer.parallel.sequence", "sequence parallelism needs trainer.parallel.tensor above 1."
    if parallel.virtual_pipeline is not None and parallel.pipeline == 1:
        yield "trainer.parallel.virtual_pipeline", "needs trainer.parallel.pipeline above 1."


def _expert_text(recipe: Recipe, experts: int) -> str:
    parallel = recipe.trainer.parallel
    left, rest = divmod(recipe.trainer.num_ranks, parallel.expert_tensor * parallel.pipeline)
    return "" if rest else fitting_text(parallel.expert, lambda n: not (left % n or experts % n), left)


def megatron_violations(recipe: Recipe) -> Iterator[Violation]:
    """Fields of `trainer.megatron` that contradict other settings, or have no effect with them."""
    rules = (_of_layout, _recompute, _optimizer, _state_dtypes, _deterministic)
    for name, message in (violation for rule in rules for violation in rule(recipe)):
        yield f"trainer.megatron.{name}", message
    yield from unused_fields("trainer.megatron", recipe.trainer.megatron)


def _of_layout(recipe: Recipe) -> Iterator[Violation]:
    """Fields about a kind of parallelism that the layout does not have."""
    parallel = recipe.trainer.parallel
    missing = {
        "deallocate_pipeline_outputs": "pipeline 1" if parallel.pipeline == 1 else "",
        "defer_embedding_wgrad_compute": "pipeline 1" if parallel.pipeline == 1 else "",
        "overlap_p2p_comm_warmup_flush": "virtual_pipeline null" if parallel.virtual_pipeline is None else "",
        "clone_scatter_output_in_embedding": "" if parallel.sequence else "sequence false",
        "cp_comm_type": "context 1" if parallel.context == 1 else "",
    }
    for name, setting in missing.items():
        if setting and recipe.trainer.megatron.get(name):
            yield name, f"has no effect with trainer.parallel.{setting}."


def _deterministic(recipe: Recipe) -> Iterator[Violation]:
    if recipe.deterministic and recipe.trainer.megatron.get("deterministic_mode") is False:
        yield "deterministic_mode", "false contradicts deterministic: true. Leave it out."


def _recompute(recipe: Recipe) -> Iterator[Violation]:
    given = recipe.trainer.megatron
    granularity, method = given.get("recompute_granularity"), given.get("recompute_method")
    if granularity == "full" and method is None:
        yield (
            "recompute_granularity",
            "full needs a method. Set recompute_method: uniform and recompute_num_layers: 1.",
        )
    elif granularity == "full" and not given.get("recompute_num_layers"):
        yield "recompute_method", f"{method} needs recompute_num_layers. Set it to 1."
    elif granularity != "full" and method is not None:
        yield "recompute_method", f"{method} needs recompute_granularity: full."
    number = int(given.get("recompute_num_layers") or 1)
    if recipe.trainer.mtp.train and method == "uniform" and number > 1:
        yield "recompute_num_layers", f"{number}: layers for multi-token prediction (trainer.mtp.train) need 1."
    for module in given.get("recompute_modules") or ():
        if module not in RECOMPUTABLE:
            known = ", ".join(RECOMPUTABLE)
            yield "recompute_modules", f"{module!r} is not one of {known}." + suggestion(str(module), RECOMPUTABLE)


def _state_dtypes(recipe: Recipe) -> Iterator[Violation]:
    """Main weights and moments below float32, which only the precision-aware optimizer supports."""
    given = recipe.trainer.megatron
    for name, known in STATE_DTYPES.items():
        dtype = given.get(name) or "float32"
        if dtype not in known:
            yield name, f"{dtype!r} is not one of {', '.join(known)}."
        elif dtype != "float32" and given.get("optimizer_cpu_offload"):
            yield name, "an offloaded optimizer (optimizer_cpu_offload) keeps float32. Leave it out."
        elif dtype != "float32" and given.get("use_precision_aware_optimizer") is False:
            yield name, f"{dtype} needs use_precision_aware_optimizer: true."


def _optimizer(recipe: Recipe) -> Iterator[Violation]:
    given, precision = recipe.trainer.megatron, recipe.trainer.precision
    if given.get("use_precision_aware_optimizer") and not recipe.trainer.optimizer.distributed:
        yield "use_precision_aware_optimizer", "needs trainer.optimizer.distributed: true."
    if not given.get("optimizer_cpu_offload"):
        return
    if not given.get("optimizer_offload_fraction"):
        yield "optimizer_cpu_offload", "offloads nothing by itself. Set optimizer_offload_fraction, 1.0 for all of it."
    if precision is not Precision.bf16:
        yield (
            "optimizer_cpu_offload",
            f"needs weights in bf16, not {precision.value}. Set trainer.precision to bf16.",
        )
    if not given.get("use_precision_aware_optimizer"):
        yield (
            "optimizer_cpu_offload",
            "main weights would stay on the device, and a checkpoint could not be loaded. Set "
            "use_precision_aware_optimizer: true.",
        )


def padded_tokens(tokens: int, recipe: Recipe) -> int:
    """Tokens of a sequence in a packed micro-batch, padding included."""
    parallel = recipe.trainer.parallel
    alignment = sequence_alignment(
        tensor=parallel.tensor,
        context=parallel.context,
        sequence=parallel.sequence,
        tile=tile_tokens(recipe.trainer),
    )
    return round_up(tokens, alignment)


def _schedule_violations(recipe: Recipe, updates: int) -> Iterator[Violation]:
    optimizer = recipe.trainer.optimizer
    if optimizer.schedule is not LrSchedule.constant and optimizer.warmup_updates >= updates:
        yield (
            "trainer.optimizer.warmup_updates",
            f"{optimizer.warmup_updates} updates of warm-up leave none of the {updates} updates of the run for the "
            f"{optimizer.schedule.value} schedule.",
        )
    if optimizer.min_lr > optimizer.lr:
        yield "trainer.optimizer.min_lr", f"{optimizer.min_lr} is above trainer.optimizer.lr {optimizer.lr}."


def warmup_warnings(recipe: Recipe, command: str) -> Iterator[Violation]:
    """A constant learning rate whose warm-up is longer than the run."""
    optimizer = recipe.trainer.optimizer
    updates = recipe.steps * (1 if command == "sft" else recipe.trainer.updates_per_rollout)
    if optimizer.schedule is LrSchedule.constant and optimizer.warmup_updates > updates:
        yield (
            "trainer.optimizer.warmup_updates",
            f"{optimizer.warmup_updates} updates of warm-up are more than the {updates} of the run, which never "
            "reaches trainer.optimizer.lr.",
        )


def _budget_violation(recipe: Recipe, key: str, tokens: int) -> Iterator[Violation]:
    trainer = recipe.trainer
    budget, needed = trainer.max_tokens_per_rank * trainer.parallel.context, padded_tokens(tokens, recipe)
    if budget < needed:
        least = -(-needed // trainer.parallel.context)
        yield (
            "trainer.max_tokens_per_rank",
            f"{trainer.max_tokens_per_rank} x context {trainer.parallel.context} = {budget} tokens cannot hold one "
            f"sequence of {key} {tokens} (padded {needed}). Use {least} or more.",
        )


def batch_violations(recipe: Recipe) -> Iterator[Violation]:
    """Groups, updates, the token budget and the schedule of `slimrl train`."""
    rollout, updates = recipe.rollout, recipe.trainer.updates_per_rollout
    rule = recipe.algorithm.advantage
    if rollout.samples_per_prompt == 1 and rule in COMPARING:
        yield "rollout.samples_per_prompt", f"1: {rule} advantages compare samples of one prompt. Use 2 or more."
    if updates > 0 and rollout.prompts_per_step % updates:
        yield (
            "rollout.prompts_per_step",
            f"{rollout.prompts_per_step} groups do not divide into trainer.updates_per_rollout {updates} equal updates."
            + multiples_text(updates, rollout.prompts_per_step),
        )
    if rollout.sampling.temperature == 0:
        yield "rollout.sampling.temperature", "0 is greedy: every sample of a group would be the same. Use 1."
    sampling = rollout.sampling
    for name, value, off, on in (
        ("top_p", sampling.top_p, 1, 0 < sampling.top_p < 1),
        ("top_k", sampling.top_k, -1, sampling.top_k >= 1),
    ):
        if on:
            yield (
                f"rollout.sampling.{name}",
                f"{value}: engines would sample from fewer tokens than the trainer's log-probs, which cover the whole "
                f"vocabulary. Use {off}; rollout.eval_sampling may differ.",
            )
    yield from _budget_violation(recipe, "rollout.max_trajectory_tokens", rollout.max_trajectory_tokens)
    yield from _schedule_violations(recipe, recipe.steps * updates)


def batch_warnings(recipe: Recipe) -> Iterator[Violation]:
    """Updates with fewer trajectories than data-parallel ranks."""
    trainer, rollout = recipe.trainer, recipe.rollout
    data = trainer.parallel.data(trainer.num_ranks)
    trajectories = rollout.prompts_per_step * rollout.samples_per_prompt // trainer.updates_per_rollout
    if trajectories < data:
        yield (
            "rollout.prompts_per_step",
            f"{trajectories} trajectories of an update leave {data - trajectories} of {data} data-parallel ranks "
            "without work.",
        )


def sft_violations(recipe: Recipe) -> Iterator[Violation]:
    """The token budget and the schedule of `slimrl sft`."""
    yield from _schedule_violations(recipe, recipe.steps)
    yield from _budget_violation(recipe, "sft.max_tokens", recipe.sft.max_tokens)
