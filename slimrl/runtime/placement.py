"""What share of a machine each process of a run asks Ray for.

Trainer and engines take turns, so together they may have all cores: nobody is kept from running, and nobody starts
more threads than its recipe says. On a GPU, `ipc` resync and `rollout.colocated` mean that a trainer rank and an
engine share one.
"""

import os
from typing import Any

from slimrl import device
from slimrl.config.schema import Recipe, TransportName


def trainer_options(recipe: Recipe, *, num_engines: int) -> dict[str, Any]:
    """Ray options of one trainer rank."""
    gpus = 0.5 if num_engines and _shares_devices(recipe) else 1.0
    return _options(recipe, num_engines, recipe.trainer.threads_per_rank, gpus, num_ranks=recipe.trainer.num_ranks)


def engine_options(recipe: Recipe, *, num_ranks: int) -> dict[str, Any]:
    """Ray options of one engine.

    Args:
        num_ranks: trainer ranks of this command; 0 where it has none.
    """
    shared = num_ranks and _shares_devices(recipe)
    gpus = recipe.rollout.engine_tensor * (0.5 if shared else 1.0)
    return _options(recipe, recipe.rollout.num_engines, recipe.rollout.threads_per_engine, gpus, num_ranks=num_ranks)


def _shares_devices(recipe: Recipe) -> bool:
    return recipe.rollout.colocated or recipe.resync.transport is TransportName.ipc


def _options(recipe: Recipe, num_engines: int, threads: int, gpus: float, *, num_ranks: int) -> dict[str, Any]:
    processes = num_ranks + num_engines
    cores = os.cpu_count() or 1
    environment = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    # Ray refuses shares finer than 1/10000 of a core.
    return {
        "num_cpus": min(1.0, int(cores / processes * 1000) / 1000),
        "num_gpus": gpus if device.device_type() == "cuda" else 0,
        "runtime_env": {"env_vars": environment},
    }
