"""A plan and suggestions as tables for a terminal."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from slimrl.config.schema.run import CheckpointConfig
from slimrl.estimates.planner.engine import GIB
from slimrl.estimates.planner.hardware import GB
from slimrl.estimates.planner.memory import copies_per_node, host_bytes_per_node, save_bytes_per_node
from slimrl.estimates.planner.model_state import data_parallel_sizes
from slimrl.estimates.planner.parameters import stage_total
from slimrl.estimates.planner.plan import Plan
from slimrl.estimates.planner.restart import LOST_OF_COPIES, LOST_OF_INTERVAL, Restart
from slimrl.estimates.planner.suggest import Suggestion
from slimrl.estimates.planner.teacher import TeacherPlan
from slimrl.observability.terminal import plain_console
from slimrl.observability.units import counted

PIPED_COLUMNS = 160

SOURCES = {
    "weights": "parameters x 2 bytes in bf16, 4 in fp32",
    "fp8_weights": "Transformer Engine's copies in FP8, parameters x 2 bytes",
    "gradients": "parameters x 4 bytes, 2 with grad_reduce_in_fp32: false",
    "optimizer": "shard of main weights and moments, 12 bytes in bf16 (arXiv:1910.02054)",
    "activations": "tensors kept for the backward pass (arXiv:2205.05198)",
    "logits": "logits of all tokens, their gradient, one chunk's float32 softmax",
    "resync": "resync.bucket_bytes; with ipc, disk and delta x 2; disk and delta 1 more with quantisation",
    "engine_weights": "bytes of a resync / engine_tp, attention's x engine_attention_dp",
    "kv_cache": "mem_fraction_static x free memory - engine weights",
    "reserve": "CUDA contexts, communication, fragmentation: --reserve-gib",
}
"""Short formula of each part of the memory."""


def print_plan(plan: Plan) -> None:
    console = plain_console(piped_columns=PIPED_COLUMNS)
    _print_world(console, plan)
    console.print(_stages(plan))
    console.print(_memory(plan))
    if plan.facts.engine is not None:
        console.print(_engines(plan))
    if plan.teacher is not None:
        console.print(_teacher(plan, plan.teacher))
    console.print(_time(plan))
    console.print(_restart(plan.restart, plan.planned.recipe.checkpoint))
    for note in plan.notes:
        console.print(f"note: {note}")
    if plan.problems:
        console.print("it does not fit: " + "; ".join(plan.problems))
    else:
        console.print("it fits")


def print_suggestions(suggestions: Sequence[Suggestion], tried: int, gpus: int) -> None:
    console = plain_console(piped_columns=PIPED_COLUMNS)
    rows = []
    for number, suggestion in enumerate(suggestions, 1):
        trainer = suggestion.plan.recipe.trainer
        parallel = trainer.parallel
        sizes = (parallel.tensor, parallel.context, parallel.pipeline, parallel.expert, trainer.max_tokens_per_rank)
        recompute = str(trainer.megatron.get("recompute_granularity") or "none")
        figures = (f"{suggestion.memory_gib:.1f}", f"{suggestion.plan.step_s:,.1f}")
        fits = "yes" if suggestion.plan.fits else "no"
        rows.append((str(number), *map(str, sizes), recompute, *figures, fits, suggestion.reason))
    columns = ("", "TP", "CP", "PP", "EP", "tokens", "recompute", "GiB", "step s", "fits", "why")
    console.print(_table(f"{tried} legal layouts of {gpus} trainer ranks, the best first", columns, rows))
    for number, suggestion in enumerate(suggestions, 1):
        console.print(f"{number}: {suggestion.settings}")


def _print_world(console: Console, plan: Plan) -> None:
    recipe, sft = plan.planned.recipe, plan.planned.sft
    trainer, parallel, rollout = recipe.trainer, recipe.trainer.parallel, recipe.rollout
    dense, experts = data_parallel_sizes(parallel, trainer.num_ranks)
    cluster = plan.cluster
    console.print(f"model: {plan.planned.model}")
    spares = f" and {counted(trainer.spare_nodes, 'spare node')}" if trainer.spare_nodes else ""
    console.print(
        f"world: {trainer.num_ranks} trainer ranks, {cluster.gpus} GPUs, {counted(cluster.num_nodes, 'node')}{spares}"
    )
    console.print(
        f"groups: tensor {parallel.tensor}, context {parallel.context}, data {dense // parallel.context}, "
        f"pipeline {parallel.pipeline} x {parallel.virtual_pipeline or 1}; expert {parallel.expert}, expert tensor "
        f"{parallel.expert_tensor}, expert data {experts}; optimizer states over {dense} and {experts} ranks"
    )
    if not sft:
        where = "on the trainer's GPUs" if recipe.shares_devices else "on GPUs of their own"
        groups = rollout.engine_attention_dp
        attention = f", attention data parallel {groups}" if groups > 1 else ""
        spread = f" over {rollout.engine_nodes} nodes" if rollout.engine_nodes > 1 else ""
        console.print(
            f"engines: {rollout.num_engines} of {rollout.engine_tp} GPUs{spread}, expert parallel {rollout.engine_ep}"
            f"{attention}, {where}"
        )
        if teachers := recipe.teacher.engines_to_start:
            console.print(f"teacher: {counted(teachers, 'engine')} of {recipe.teacher.engine_tp} GPUs of their own")
        if count := recipe.past_engines:
            engines = counted(count, "engine")
            console.print(f"older versions: {engines} like those above, on {rollout.engine_tp} GPUs of their own each")
        if plan.critic is not None:
            gib = f"{plan.critic.most_bytes / GIB:.1f} GiB of {plan.hardware.gpu_memory_gib:g} on the fullest"
            console.print(f"critic: {counted(recipe.critic_ranks, 'rank')} on GPUs of their own, {gib}")
    known = plan.facts.parameters
    console.print(f"parameters: {known.total:,}, {known.active:,} active per token")
    console.print()


def _stages(plan: Plan) -> Table:
    layout = plan.layout
    adapters = layout.adapters
    rows = [
        (
            str(index),
            str(len(layout.layers[index])),
            f"{stage_total(stage):,}",
            *([] if adapters is None else [f"{stage_total(adapters[index]):,}"]),
            *(f"{nbytes / GIB:.1f}" for nbytes in layout.memory[index].phases.values()),
        )
        for index, stage in enumerate(layout.stages)
    ]
    phases = (f"GiB, {phase}" for phase in layout.memory[0].phases)
    sizes = ("parameters",) if adapters is None else ("parameters", "in adapters")
    return _table("a rank of each stage", ("stage", "layers", *sizes, *phases), rows)


def _memory(plan: Plan) -> Table:
    layout = plan.layout
    worst = layout.memory[layout.worst]
    rows = [(name, f"{nbytes / GIB:.2f}", SOURCES[name]) for name, nbytes in worst.parts.items() if nbytes]
    rows += [(f"= {phase}", f"{nbytes / GIB:.2f}", "peak") for phase, nbytes in worst.phases.items()]
    rows.append(("limit", f"{plan.hardware.gpu_memory_gib:.2f}", "--gpu-memory-gib"))
    if worst.host:
        rows.append(("host", f"{worst.host / GIB:.2f}", "host memory: offloaded optimizer, released trainer memory"))
    known = plan.planned.recipe, layout.memory, plan.hardware
    saving, on_node = save_bytes_per_node(*known), host_bytes_per_node(*known)
    rows.append(("host of a save", f"{saving / GIB:,.2f}", "of a node's ranks, while a checkpoint is written"))
    if copies := copies_per_node(*known):
        rows.append(("host of copies", f"{copies / GIB:,.2f}", "of a node: in /dev/shm, and one copy that is written"))
    limit = f"of a node's {plan.hardware.host_memory_gib:,g}, --host-memory-gib"
    rows.append(("= host of a node", f"{on_node / GIB:,.2f}", limit))
    return _table(f"memory of a GPU of stage {layout.worst}", ("part", "GiB", "from"), rows)


def _engines(plan: Plan) -> Table:
    engine, rollout = plan.facts.engine, plan.planned.recipe.rollout
    assert engine is not None
    own_gpu = [] if plan.layout.engine_gpu is None else [("total on a GPU", f"{plan.layout.engine_gpu / GIB:.2f} GiB")]
    rows = [
        *own_gpu,
        ("weights on a GPU", f"{engine.weights / GIB:.2f} GiB"),
        ("KV cache on a GPU", f"{engine.kv_cache / GIB:.2f} GiB"),
        ("mem_fraction_static", f"{engine.mem_fraction_static:g}"),
        ("KV cache bytes per token on a GPU", f"{engine.kv_bytes_per_token:,}"),
        ("tokens in the KV cache of an engine", f"{engine.kv_tokens:,}"),
        *([] if engine.sequences is None else [("sequences with states in an engine", f"{engine.sequences:,}")]),
        (
            f"trajectories of {rollout.max_trajectory_tokens:,} tokens at once, all engines",
            f"{engine.trajectories:,} (rollout.max_concurrency_per_engine {rollout.max_concurrency_per_engine:,} "
            f"x {rollout.num_engines:,})",
        ),
    ]
    return _table("engines", ("", ""), rows)


def _teacher(plan: Plan, teacher: TeacherPlan) -> Table:
    settings = plan.planned.recipe.teacher
    rows = [
        ("parameters", f"{teacher.parameters.total:,}, {teacher.parameters.active:,} active per token"),
        ("total on a GPU", f"{teacher.gpu_bytes / GIB:.2f} GiB"),
        ("weights on a GPU", f"{teacher.engine.weights / GIB:.2f} GiB"),
        ("tokens in the KV cache of an engine", f"{teacher.engine.kv_tokens:,}"),
        (
            f"trajectories of {plan.planned.recipe.rollout.max_trajectory_tokens:,} tokens at once, all engines",
            f"{teacher.engine.trajectories:,} (teacher.max_concurrency_per_engine "
            f"{settings.max_concurrency_per_engine:,} x {settings.num_engines:,})",
        ),
    ]
    return _table("teacher", ("", ""), rows)


def _time(plan: Plan) -> Table:
    layout, work, batch = plan.layout, plan.layout.work, plan.layout.batch
    peta = 10**15
    hardware = plan.hardware
    at = f"at {hardware.mfu:g} of {hardware.peak_tflops:g} TFLOPS"
    rows = [
        ("update", f"{batch.tokens:,} tokens, {batch.micro_batches} micro-batches a rank, {layout.updates} a step"),
        ("pipeline bubble", f"{work.bubble:.1%}"),
        ("training", f"{work.training_s:,.1f} s {at}, {work.training_flops / peta:,.0f} PFLOP a step"),
        ("communication", f"{layout.communication_s:,.1f} s without overlap"),
    ]
    if not plan.planned.sft:
        rows += [
            ("log-probs", f"{work.logprob_s:,.1f} s, {work.logprob_flops / peta:,.0f} PFLOP"),
            ("rollout", f"at least {work.rollout_at_least_s:,.1f} s, {work.generation_flops / peta:,.0f} PFLOP"),
        ]
    if layout.host_update_s:
        rows.append(("optimizer", f"{layout.updates * layout.host_update_s:,.1f} s on the host"))
    if plan.resync is not None:
        rows.append(("resync", f"{plan.resync.seconds:,.1f} s, {plan.resync.sent_bytes / GB:,.1f} GB"))
        rows.append(("", ", ".join(f"{name} {n / GB:,.0f} GB" for name, n in plan.resync.link_bytes.items())))
    at_least = "at least " if layout.work.rollout_at_least_s else ""
    overlap = ", the longer of rollout and training, and the resync" if layout.overlaps else ""
    rows.append(("= step", f"{at_least}{plan.step_s:,.1f} s{overlap}"))
    return _table("time of a step", ("", ""), rows)


def _restart(restart: Restart, checkpoint: CheckpointConfig) -> Table:
    size = f"a checkpoint of {restart.checkpoint_bytes / GB:,.0f} GB"
    resync = ", and a resync" if restart.resync_s else ""
    read = f"{size} is checked and read, {_seconds(restart.checkpoint_s)} each{resync}"
    model = f", the engines' model in {_seconds(restart.engines_s)}" if restart.engines_s else ""
    every, copies = checkpoint.every_steps, checkpoint.in_memory_every_steps
    lost = "all steps: checkpoint.every_steps is 0"
    if restart.lost_s is not None:
        half = f"{LOST_OF_INTERVAL * every:g} steps, half of checkpoint.every_steps {every}"
        lost = f"{_seconds(restart.lost_s)} on average ({half})"
    rows = []
    if restart.in_place_s is not None:
        rows.append(("in place (the job goes on)", f"at least {_seconds(restart.in_place_s)}: {read}"))
    same = "the same" if rows else read
    rows.append(
        ("new job (--resume, without the queue's wait)", f"at least {_seconds(restart.new_job_s)}: {same}{model}")
    )
    rows.append(("lost work", lost))
    if restart.from_copy_s is not None and restart.lost_from_copy_s is not None:
        least = f"at least {_seconds(restart.from_copy_s)}: nothing is read from the disk{resync}"
        steps = f"{LOST_OF_COPIES:g} x checkpoint.in_memory_every_steps {copies}"
        rows += [
            ("in place, with a copy in memory", least),
            ("lost work with a copy", f"about {_seconds(restart.lost_from_copy_s)} on average ({steps})"),
        ]
    return _table("after a death of the trainer", ("", ""), rows)


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds < 10 else f"{seconds:,.0f} s"


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, header_style="bold", title=title, title_justify="left", title_style="bold")
    for number, column in enumerate(columns):
        right = any(row[number].replace(",", "").replace(".", "").isdigit() for row in rows)
        table.add_column(column, justify="right" if right else "left")
    for row in rows:
        table.add_row(*row)
    return table
