"""Whether engines and trainer ranks fit into the memory of this machine, where it has no GPU.

Ray ends a process of a run that takes more than its share of it, minutes after the start and without saying which
setting was too large. What is counted here is taken for certain, so that nothing is refused that could run: weights, KV
caches, gradients, the optimizer's state and the processes themselves. Activations come on top.
"""

import shutil
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import torch
from ray._common.utils import get_system_memory

from slimrl import device
from slimrl.config.critic import critic_recipe
from slimrl.config.load import SERVING, LoadedRecipe, trains
from slimrl.config.problems import Problem
from slimrl.config.restart_rules import IN_MEMORY, RESTARTING
from slimrl.config.schema.recipe import Recipe
from slimrl.engines.plugin.cpu.packed_linear import MIN_ELEMENTS, packed_dtypes
from slimrl.engines.servers.server import CPU_MEMORY_FRACTION, cpu_cache_tokens
from slimrl.models.family import family_of
from slimrl.models.hf_config import read_hf_config
from slimrl.resync.ipc.shared_buffer import SHARED_MEMORY_DIR
from slimrl.resync.ipc.stale_files import clean_stale_segments

GIB = 1024**3

PROCESS_BYTES = 250 * 1024**2
"""What a process with torch and SGLang or Megatron holds alone, without a model; less than was measured with torch 2.14
on Linux, where an engine's processes held 0.56 GB besides weights and cache."""

PROCESSES_OF_ENGINE = 2
"""SGLang's server and scheduler; each further rank is one more."""

UPDATING = ("train", "sft", "train --trajectories")
"""Commands that update weights, and so have gradients and the optimizer's state."""

RAYS_SHARE = 0.95
"""Fraction of the memory above which Ray ends processes, by default."""


_FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa"), "fused_qkv_a_proj_with_mqa"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}
"""Matrices of which SGLang makes one, and its name"""


def memory_problems(loaded: LoadedRecipe) -> list[Problem]:
    """That a run cannot fit into this machine, and what to lower; none on a machine with a GPU.

    The checkpoint has been checked.
    """
    recipe = loaded.recipe
    if device.device_type() == "cuda":
        return []
    hf_config = read_hf_config(Path(recipe.model.path))
    has = get_system_memory()
    engines = _engine_bytes(recipe, hf_config, has) if loaded.command in SERVING else {}
    updates = loaded.command in UPDATING
    ranks = _rank_bytes(recipe, hf_config, updates=updates) if trains(loaded.command) else {}
    if copies := copies_here(loaded):
        ranks["copies of checkpoints"] = copies
    needed = sum((engines | ranks).values())
    if needed <= RAYS_SHARE * has:
        return []
    parts = ", ".join(f"{name} {nbytes / GIB:.1f}" for name, nbytes in (engines | ranks).items())
    key, lower = _to_lower(recipe, engines, ranks)
    return [
        loaded.problem(
            key,
            f"the run takes at least {needed / GIB:.1f} GiB, and this machine has {has / GIB:.1f}, of which Ray leaves "
            f"{RAYS_SHARE:.0%}: {parts} GiB. {lower}",
        )
    ]


def _engine_bytes(recipe: Recipe, hf_config: dict[str, Any], has: int) -> dict[str, int]:
    """What all engines take on a machine with so many bytes. SGLang lowers a cache that is larger than its fraction of
    the memory."""
    rollout, width = recipe.rollout, recipe.trainer.precision.element_bytes
    tokens = rollout.sglang.get("max_total_tokens") or cpu_cache_tokens(rollout, recipe.step_trajectories)
    cache = tokens * rollout.engine_attention_dp * family_of(hf_config).megatron_config(hf_config).cached_elements
    fraction = rollout.sglang.get("mem_fraction_static") or CPU_MEMORY_FRACTION
    processes = PROCESSES_OF_ENGINE + rollout.engine_tp - 1
    return {
        "KV caches": rollout.num_engines * min(cache * width, int(fraction * has)),
        "engines' weights and processes": rollout.num_engines
        * ((_parameters(hf_config) + _packed(recipe, hf_config)) * width + processes * PROCESS_BYTES),
    }


def _packed(recipe: Recipe, hf_config: dict[str, Any]) -> int:
    """Elements of an engine's weights that it has in oneDNN's layout too (engines/plugin/cpu/packed_linear.py)."""
    if getattr(torch, recipe.trainer.precision.dtype) not in packed_dtypes():
        return 0
    sizes = Counter[str]()
    for spec in family_of(hf_config).hf_tensor_specs(hf_config):
        if len(spec.shape) == 2:
            *path, layer, kind = spec.name.split(".")
            sizes[".".join((*path, _FUSED.get(layer, layer), kind))] += prod(spec.shape)
    if "lm_head.weight" in sizes:
        sizes.pop("model.embed_tokens.weight", None)
    # Experts have products of their own, and latent attention takes kv_b_proj apart.
    linear = (size for name, size in sizes.items() if ".experts." not in name and "kv_b_proj" not in name)
    return sum(size for size in linear if size >= MIN_ELEMENTS * recipe.rollout.engine_tp)


def _rank_bytes(recipe: Recipe, hf_config: dict[str, Any], *, updates: bool) -> dict[str, int]:
    """What all trainer ranks take: each replica of the model its weights and, with `updates`, gradients, and all
    together Adam's two float32 moments, with a float32 copy of bfloat16 weights. With adapters the weights alone."""
    trainer, parameters = recipe.trainer, _parameters(hf_config)
    width, layout = trainer.precision.element_bytes, trainer.parallel
    shards = layout.pipeline * max(layout.tensor, layout.expert * layout.expert_tensor)
    replicas = max(1, trainer.num_ranks // shards)
    model = replicas * parameters * width
    if updates and not trainer.lora.rank:
        model += parameters * (replicas * width + 8 + (4 if width < 4 else 0))
    return {"trainer ranks": model + trainer.num_ranks * PROCESS_BYTES}


def copies_bytes(recipe: Recipe, num_nodes: int, *, with_critic: bool) -> int:
    """What checkpoints in memory take at least in /dev/shm of all nodes together; 0 without them.

    They are the newest one and that which takes its place, of several nodes each twice, with the weights and in float32
    Adam's main weights and both moments.
    """
    if not recipe.checkpoint.in_memory_every_steps:
        return 0
    hf_config = read_hf_config(Path(recipe.model.path))
    of_one = _parameters(hf_config) * _saved_bytes(recipe)
    if with_critic:
        of_one += (_parameters(hf_config) - _of_head(hf_config)) * _saved_bytes(critic_recipe(recipe))
    return (2 if num_nodes == 1 else 4) * of_one


def _saved_bytes(recipe: Recipe) -> int:
    """What a checkpoint has of a parameter."""
    return recipe.trainer.precision.element_bytes + (0 if recipe.trainer.lora.rank else 12)


def copies_here(loaded: LoadedRecipe) -> int:
    """`copies_bytes` of a run on this machine alone."""
    if loaded.command not in RESTARTING:
        return 0
    return copies_bytes(loaded.recipe, 1, with_critic=loaded.command == "train" and loaded.recipe.has_critic)


def shared_memory_problems(loaded: LoadedRecipe) -> list[Problem]:
    """That /dev/shm of this machine has no room for checkpoints in memory."""
    if not (needed := copies_here(loaded)):
        return []
    free = shared_memory_free()
    return [] if needed <= free else [loaded.problem(IN_MEMORY, no_room(needed, f"are {free / GIB:.1f} GiB"))]


def shared_memory_free() -> int:
    """Bytes that are free in this node's /dev/shm, without what runs of this user that were killed have left there."""
    clean_stale_segments()
    return shutil.disk_usage(SHARED_MEMORY_DIR).free


def no_room(needed: int, there: str) -> str:
    return (
        f"checkpoints in memory take at least {needed / GIB:.1f} GiB of /dev/shm, and there {there} free. Use 0, mount "
        "/dev/shm larger (in a container --shm-size), or take a smaller model."
    )


def _parameters(hf_config: dict[str, Any]) -> int:
    return sum(prod(spec.shape) for spec in family_of(hf_config).hf_tensor_specs(hf_config))


def _of_head(hf_config: dict[str, Any]) -> int:
    """Those of `_parameters` that a critic has a head with one output for."""
    specs = family_of(hf_config).hf_tensor_specs(hf_config)
    return sum(prod(spec.shape) for spec in specs if spec.name.endswith("lm_head.weight"))


def _to_lower(recipe: Recipe, engines: dict[str, int], ranks: dict[str, int]) -> tuple[str, str]:
    """The key to lower, of the largest part, and what to do."""
    both = engines | ranks
    largest, rollout = max(both, key=lambda name: both[name]), recipe.rollout
    if largest == "copies of checkpoints":
        return IN_MEMORY, "Use 0, or take a smaller model."
    if largest in ranks:
        return "trainer.num_ranks", f"Lower it from {recipe.trainer.num_ranks}, or take a smaller model."
    if largest != "KV caches":
        return "rollout.num_engines", f"Lower it from {rollout.num_engines}, or take a smaller model."
    if rollout.sglang.get("max_total_tokens"):
        return "rollout.sglang.max_total_tokens", "Lower it, or leave it out."
    tokens = cpu_cache_tokens(rollout, recipe.step_trajectories)
    most = recipe.step_trajectories
    of_step = f", a step has {most:,} trajectories" if most is not None else ""
    return "rollout.max_trajectory_tokens", (
        f"A cache has {tokens:,} tokens: the trajectories that an engine runs at a time "
        f"(rollout.max_concurrency_per_engine is {rollout.max_concurrency_per_engine:,}{of_step}) x "
        f"rollout.max_trajectory_tokens, {rollout.max_trajectory_tokens:,}. Lower one of these, or rollout.num_engines."
    )
