"""Rules of the rollout: engine sizes, deadlines, lengths, shared memory, and the transport."""

from collections.abc import Iterator

from slimrl.config.passthrough import unused_fields
from slimrl.config.problems import Violation, fitting_text
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.resync import TransportName
from slimrl.config.sglang_kernels import graph_violations
from slimrl.config.speculative_rules import speculative_violations

MAX_COLOCATED_FRACTION = 0.85
"""Largest fraction of a shared device for the weights and the KV cache of an engine."""

MORE_NODES = "Spread each engine over several nodes (rollout.engine_nodes)"
LARGER_ENGINES = f"{MORE_NODES}; a model in block FP8 takes about half as many GPUs (slimrl-tools quantize)."
"""Advice for a model or an engine that is too large for a node."""


def rollout_violations(recipe: Recipe, experts: int) -> Iterator[Violation]:
    """Engine sizes, deadlines, lengths and the transport.

    Args:
        experts: of a layer, 1 for a dense one, 0 if unknown; suggested sizes divide them.
    """
    rollout = recipe.rollout
    ranks, parts = rollout.engine_tp, rollout.engine_ep
    if ranks % parts:
        yield (
            "rollout.engine_ep",
            f"{parts} does not divide rollout.engine_tp {ranks}."
            + fitting_text(parts, lambda n: not (ranks % n or experts % n), ranks),
        )
    yield from _attention_violations(recipe)
    if ranks % rollout.engine_nodes:
        yield (
            "rollout.engine_nodes",
            f"{rollout.engine_nodes} does not divide rollout.engine_tp {ranks}."
            + fitting_text(rollout.engine_nodes, lambda n: not ranks % n, ranks),
        )
    yield from _elastic_violations(recipe)
    for name in ("sampling", "eval_sampling"):
        new = getattr(rollout, name).max_new_tokens
        if new >= rollout.max_trajectory_tokens:
            yield (
                f"rollout.{name}.max_new_tokens",
                f"{new} leaves no room for a prompt in rollout.max_trajectory_tokens {rollout.max_trajectory_tokens}.",
            )
    for name in ("request_timeout_s", "tool_timeout_s"):
        if getattr(rollout, name) > rollout.trajectory_timeout_s:
            yield (
                f"rollout.{name}",
                f"{getattr(rollout, name)} is longer than rollout.trajectory_timeout_s {rollout.trajectory_timeout_s}.",
            )
    if rollout.chunk_tokens and recipe.deterministic:
        yield (
            "rollout.chunk_tokens",
            f"{rollout.chunk_tokens}: parts of a turn that fail are asked for again at any moment, so a deterministic "
            "run cannot repeat its batches. Use 0, or deterministic false.",
        )
    if rollout.adaptive_concurrency and recipe.deterministic:
        yield (
            "rollout.adaptive_concurrency",
            "how full the engines' caches are depends on the clock, so a deterministic run cannot repeat it. Use "
            "false, or deterministic false.",
        )
    yield from speculative_violations(recipe)
    yield from _sglang_violations(recipe)
    if recipe.resync.transport is TransportName.delta and not recipe.resync.local_dir:
        yield "resync.local_dir", "delta needs a folder on a local disk of each node, with room for the model."
    if rollout.colocated and recipe.resync.transport is TransportName.p2p:
        yield (
            "rollout.colocated",
            "p2p needs engines on devices of their own. Use resync.transport ipc, or colocated false.",
        )


def _attention_violations(recipe: Recipe) -> Iterator[Violation]:
    ranks, groups = recipe.rollout.engine_tp, recipe.rollout.engine_attention_dp
    if ranks % groups:
        yield (
            "rollout.engine_attention_dp",
            f"{groups} does not divide rollout.engine_tp {ranks}."
            + fitting_text(groups, lambda n: not ranks % n, ranks),
        )
    if groups > 1 and recipe.rollout.engine_nodes > 1:
        yield (
            "rollout.engine_attention_dp",
            f"{groups}: engines in groups run on one node, and rollout.engine_nodes is {recipe.rollout.engine_nodes}. "
            "Set either to 1.",
        )
    if groups > 1 and recipe.deterministic:
        yield (
            "rollout.engine_attention_dp",
            f"{groups}: requests reach the groups of an engine at different moments, so a deterministic run cannot "
            "repeat its batches. Use 1, or deterministic false.",
        )


def kept_memory_warnings(recipe: Recipe) -> Iterator[Violation]:
    """GPUs on which trainer and engines both keep their memory; a recipe for CPUs sets no mem_fraction_static."""
    if recipe.shares_devices and not recipe.rollout.colocated and "mem_fraction_static" in recipe.rollout.sglang:
        yield (
            "rollout.colocated",
            f"with resync.transport {recipe.resync.transport.value} engines run on the trainer's GPUs, and false lets "
            "both keep all of their memory. Set true, or resync.transport p2p for engines on GPUs of their "
            "own.",
        )


def transport_warnings(recipe: Recipe) -> Iterator[Violation]:
    """Folders that the transport ignores."""
    resync = recipe.resync
    users = {"dir": (TransportName.disk, TransportName.delta), "local_dir": (TransportName.delta,)}
    for name, transports in users.items():
        if getattr(resync, name) and resync.transport not in transports:
            of = " and ".join(transport.value for transport in transports)
            yield f"resync.{name}", f"has no effect with resync.transport {resync.transport.value}, only with {of}."


def _sglang_violations(recipe: Recipe) -> Iterator[Violation]:
    """Fields of `rollout.sglang` that contradict other settings, or have no effect with them."""
    rollout, given = recipe.rollout, recipe.rollout.sglang
    fraction, length = given.get("mem_fraction_static"), given.get("context_length")
    if fraction is not None and not 0 < fraction < 1:
        yield "rollout.sglang.mem_fraction_static", f"{fraction}: must lie between 0 and 1, both excluded."
    if length is not None and length < rollout.max_trajectory_tokens:
        yield (
            "rollout.sglang.context_length",
            f"{length} is shorter than rollout.max_trajectory_tokens {rollout.max_trajectory_tokens}.",
        )
    if recipe.deterministic and given.get("enable_deterministic_inference") is False:
        yield "rollout.sglang.enable_deterministic_inference", "false contradicts deterministic: true. Leave it out."
    yield from unused_fields("rollout.sglang", given)
    if rollout.colocated:
        yield from graph_violations(given)


def _elastic_violations(recipe: Recipe) -> Iterator[Violation]:
    """Engines that join or leave a run."""
    rollout, count = recipe.rollout, recipe.rollout.num_engines
    if rollout.min_engines > count:
        yield "rollout.min_engines", f"{rollout.min_engines} is above rollout.num_engines {count}. Use at most {count}."
    if 0 < rollout.max_engines < count:
        yield "rollout.max_engines", f"{rollout.max_engines} is below rollout.num_engines {count}. Use {count} or more."
    if rollout.max_engines > count and not recipe.may_add_engines:
        yield (
            "rollout.max_engines",
            f"{rollout.max_engines} lets engines join on other nodes. Use rollout.colocated false, resync.transport "
            "p2p, disk or delta, rollout.engine_nodes 1 and deterministic false, or leave it out.",
        )
    if 0 < rollout.min_engines < count and (rollout.colocated or recipe.deterministic):
        yield (
            "rollout.min_engines",
            f"{rollout.min_engines} lets a run start without all of its engines, which a colocated or deterministic "
            "one needs. Leave it out.",
        )


def colocation_violations(recipe: Recipe) -> Iterator[Violation]:
    """Engines on the trainer's devices, for commands that start both."""
    rollout, ranks = recipe.rollout, recipe.trainer.num_ranks
    if not rollout.colocated:
        return
    needed = rollout.num_engines * rollout.engine_tp
    if needed > ranks:
        most = ranks // rollout.engine_tp
        instead = f"Use {most}" if most else f"Use rollout.engine_tp {ranks} or less"
        yield (
            "rollout.num_engines",
            f"{rollout.num_engines} engines of {rollout.engine_tp} ranks do not fit on the {ranks} devices of the "
            f"trainer that they share. {instead}, or colocated false.",
        )
    fraction = rollout.sglang.get("mem_fraction_static")
    if fraction is not None and MAX_COLOCATED_FRACTION < fraction < 1:
        yield (
            "rollout.sglang.mem_fraction_static",
            f"{fraction} leaves a colocated trainer {1 - fraction:.0%} of a device for the memory that it keeps while "
            "engines generate: its context, communication buffers and resync buffers. Use "
            f"{MAX_COLOCATED_FRACTION} or less.",
        )


def colocation_warnings(recipe: Recipe) -> Iterator[Violation]:
    """Shared devices without an engine, and engines without a memory limit."""
    rollout, ranks = recipe.rollout, recipe.trainer.num_ranks
    if not rollout.colocated:
        return
    idle = ranks - rollout.num_engines * rollout.engine_tp
    if idle > 0:
        yield (
            "rollout.num_engines",
            f"{idle} of the {ranks} devices that engines share with the trainer have no engine and are idle during a "
            f"rollout. {ranks // rollout.engine_tp} engines would fit.",
        )
    if "mem_fraction_static" not in rollout.sglang:
        yield (
            "rollout.colocated",
            "without rollout.sglang.mem_fraction_static SGLang takes memory as if it were alone on a GPU. Set it to "
            f"{MAX_COLOCATED_FRACTION} or less.",
        )
