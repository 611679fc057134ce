"""Rules of the rollout: engine sizes, deadlines, lengths, memory that is shared, and the reach of the transport."""

from collections.abc import Iterator
from typing import Any

from slimrl.config.devices import shares_devices
from slimrl.config.divisors import fitting_text
from slimrl.config.problems import Violation
from slimrl.config.schema import Recipe, TransportName

MAX_COLOCATED_FRACTION = 0.85
"""Most of a device that the weights and the KV cache of an engine may take where it shares the device."""

ONE_NODE_ENGINES = (
    "For more speed use more engines; a model that a node's GPUs do not hold takes about half as many in block FP8 "
    "(slimrl-tools quantize)."
)
"""What to do instead of an engine of several nodes, which there is not."""

_REPLICAS = "Use rollout.num_engines for replicas."
_RANKS = "Use rollout.engine_tensor and engine_expert."
_LEAVE = "Leave it out."

SGLANG_LAYOUTS: dict[str, tuple[Any, str]] = {
    "node_rank": (0, _LEAVE),
    "dp_size": (1, _REPLICAS),
    "attn_dp_size": (1, _REPLICAS),
    "moe_dp_size": (1, _REPLICAS),
    "dwdp_size": (1, _LEAVE),
    "pp_size": (1, _RANKS),
    "attn_cp_size": (1, _RANKS),
    "dcp_size": (1, _RANKS),
    "dcp_replicate_q_proj": (None, _LEAVE),
    "enable_prefill_cp": (False, _RANKS),
    "enable_cp_tp_group_sharing": (False, _LEAVE),
    "enable_cp_decode_attn_tp": (False, _LEAVE),
    "enable_dp_attention": (False, _LEAVE),
    "enable_dp_lm_head": (False, _LEAVE),
    "enable_shared_experts_attn_tp": (False, _LEAVE),
    "shared_experts_tp_size": (None, _LEAVE),
    "enable_dense_mlp_attn_tp": (False, _LEAVE),
    "moe_dense_tp_size": (None, _RANKS),
    "enable_megamoe_for_layernorm_sp": (False, _LEAVE),
    "ep_join_rank_offset": (0, _LEAVE),
    "elastic_ep_initial_size": (None, _LEAVE),
    "max_ep_size": (None, _LEAVE),
    "moe_a2a_backend": ("none", _RANKS),
    "ep_num_redundant_experts": (0, _LEAVE),
    "init_expert_location": ("trivial", _LEAVE),
    "enable_eplb": (False, _LEAVE),
    "elastic_ep_backend": ("none", _LEAVE),
    "enable_elastic_expert_backup": (False, _LEAVE),
    "ep_join_mode": (None, _LEAVE),
    "enable_waterfill": (False, _LEAVE),
    "enforce_shared_experts_fusion": (False, _LEAVE),
    "enable_paged_experts": (False, _LEAVE),
    "kt_weight_path": (None, _LEAVE),
    "kt_num_gpu_experts": (None, _LEAVE),
    "cpu_offload_gb": (0, _LEAVE),
    "offload_group_size": (-1, _LEAVE),
}
"""Fields of ServerArgs that lay weights out as models/engine_layout.py does not describe: SGLang's default, which does
not, and what to do instead of another value."""


def rollout_violations(recipe: Recipe, experts: int) -> Iterator[Violation]:
    """Engine sizes, deadlines, lengths and the reach of the transport.

    Args:
        experts: of a layer, 1 for a dense one; 0 where that is not known. What is to be used instead divides them.
    """
    rollout = recipe.rollout
    ranks, parts = rollout.engine_tensor, rollout.engine_expert
    if ranks % parts:
        yield (
            "rollout.engine_expert",
            f"{parts} does not divide rollout.engine_tensor {ranks}."
            + fitting_text(parts, lambda n: not (ranks % n or experts % n), ranks),
        )
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
    yield from _sglang_violations(recipe)
    if recipe.resync.transport is TransportName.delta and not recipe.resync.local_dir:
        yield "resync.local_dir", "delta needs a folder on the own disk of each node, with room for the model."
    if rollout.colocated and recipe.resync.transport is TransportName.collective:
        yield (
            "rollout.colocated",
            "collective needs devices of the engines' own. Use resync.transport ipc, or colocated false.",
        )


def kept_memory_warnings(recipe: Recipe) -> Iterator[Violation]:
    """GPUs on which trainer and engines both keep everything; a recipe for CPUs sets no share of a GPU's memory."""
    if shares_devices(recipe) and not recipe.rollout.colocated and "mem_fraction_static" in recipe.rollout.sglang:
        yield (
            "rollout.colocated",
            f"with resync.transport {recipe.resync.transport.value} engines are on the trainer's GPUs, and with false "
            "both keep all of their memory. Set true, or resync.transport collective for engines with GPUs of their "
            "own.",
        )


def transport_warnings(recipe: Recipe) -> Iterator[Violation]:
    """Folders that the transport does not use."""
    resync = recipe.resync
    users = {"dir": (TransportName.disk, TransportName.delta), "local_dir": (TransportName.delta,)}
    for name, transports in users.items():
        if getattr(resync, name) and resync.transport not in transports:
            of = " and ".join(transport.value for transport in transports)
            yield f"resync.{name}", f"has no effect with resync.transport {resync.transport.value}, only with {of}."


def _sglang_violations(recipe: Recipe) -> Iterator[Violation]:
    """Fields of `rollout.sglang` that do not go with how engines are used here."""
    rollout, given = recipe.rollout, recipe.rollout.sglang
    fraction, length = given.get("mem_fraction_static"), given.get("context_length")
    if fraction is not None and not 0 < fraction < 1:
        yield "rollout.sglang.mem_fraction_static", f"{fraction}: must lie between 0 and 1, both excluded."
    if length is not None and length < rollout.max_trajectory_tokens:
        yield (
            "rollout.sglang.context_length",
            f"{length} is shorter than rollout.max_trajectory_tokens {rollout.max_trajectory_tokens}.",
        )
    if given.get("nnodes", 1) != 1:
        yield (
            "rollout.sglang.nnodes",
            f"{given['nnodes']}: an engine runs on one node. Leave it out. {ONE_NODE_ENGINES}",
        )
    for name, (default, instead) in SGLANG_LAYOUTS.items():
        value = given.get(name)
        # SGLang is not told of None and False.
        if value is not None and value is not False and value != default:
            yield f"rollout.sglang.{name}", f"{value}: a resync cannot place weights in such an engine. {instead}"


def colocation_violations(recipe: Recipe) -> Iterator[Violation]:
    """Engines on the trainer's devices, for commands that start both."""
    rollout, ranks = recipe.rollout, recipe.trainer.num_ranks
    if not rollout.colocated:
        return
    needed = rollout.num_engines * rollout.engine_tensor
    if needed > ranks:
        most = ranks // rollout.engine_tensor
        instead = f"Use {most}" if most else f"Use rollout.engine_tensor {ranks} or less"
        yield (
            "rollout.num_engines",
            f"{rollout.num_engines} engines of {rollout.engine_tensor} ranks do not fit on the {ranks} devices of the "
            f"trainer that they share. {instead}, or colocated false.",
        )
    fraction = rollout.sglang.get("mem_fraction_static")
    if fraction is not None and MAX_COLOCATED_FRACTION < fraction < 1:
        yield (
            "rollout.sglang.mem_fraction_static",
            f"{fraction} leaves a colocated trainer {1 - fraction:.0%} of a device for what it keeps while engines "
            f"generate: its context, communication buffers and the slots of a resync. Use {MAX_COLOCATED_FRACTION} or "
            "less.",
        )


def colocation_warnings(recipe: Recipe) -> Iterator[Violation]:
    """Shared devices of which engines use not all, or more than was thought of."""
    rollout, ranks = recipe.rollout, recipe.trainer.num_ranks
    if not rollout.colocated:
        return
    idle = ranks - rollout.num_engines * rollout.engine_tensor
    if idle > 0:
        yield (
            "rollout.num_engines",
            f"{idle} of the {ranks} devices that engines share with the trainer have no engine and idle while the "
            f"others generate. {ranks // rollout.engine_tensor} engines would fit.",
        )
    if "mem_fraction_static" not in rollout.sglang:
        yield (
            "rollout.colocated",
            "without rollout.sglang.mem_fraction_static SGLang takes what suits an engine alone on a GPU. Set it, to "
            f"{MAX_COLOCATED_FRACTION} or less.",
        )
