"""Checkpoints of a training run: weights, optimizer, schedule and random-number states, loadable under any layout.

A checkpoint is a folder:
- `checkpoint.json`: the model's architecture and the layout that saved it;
- `rng/`: random-number states by rank, restored where the layout is the same;
- the rest: megatron-core's distributed format (torch_dist), each rank having written its shards.
It is written under a temporary name beside its place and renamed when whole.
"""

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import random as megatron_random

from slimrl.models.architecture import FACTS_FILE, check_architecture, read_facts
from slimrl.trainer.build import unwrap
from slimrl.trainer.optimizer import Optimizer
from slimrl.trainer.parallel import Layout, seed_ranks

log = logging.getLogger(__name__)


def save(
    directory: Path,
    chunks: list[DistributedDataParallel],
    optimizer: Optimizer,
    layout: Layout,
    architecture: dict[str, Any],
) -> None:
    """Write a checkpoint; every rank calls it, on a file system that all see.

    Args:
        directory: must not exist yet.
        architecture: facts of the model, from architecture_of.

    Raises:
        ValueError: the folder exists.
    """
    if directory.exists():
        raise ValueError(f"{directory}: there is a checkpoint already")
    partial = directory.with_name(f".{directory.name}.partial")
    if layout.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        (partial / "rng").mkdir(parents=True)
        facts = {"architecture": architecture, "layout": layout.sizes()}
        (partial / FACTS_FILE).write_text(json.dumps(facts, indent=2, sort_keys=True) + "\n")
    dist.barrier()
    torch.save(_rng_state(), partial / "rng" / f"{layout.rank:05d}.pt")
    optimizer.create_state()
    metadata = _metadata()
    content = {name: value for name, value in metadata.items() if name != "dp_cp_group"}
    dist_checkpointing.save(_sharded_state(chunks, optimizer, metadata), str(partial), content_metadata=content)
    dist.barrier()
    if layout.rank == 0:
        os.rename(partial, directory)
    dist.barrier()


def load(
    directory: Path,
    chunks: list[DistributedDataParallel],
    optimizer: Optimizer,
    layout: Layout,
    architecture: dict[str, Any],
    *,
    seed: int,
) -> None:
    """Restore a checkpoint into a model under this or another layout; every rank calls it.

    The learning-rate schedule keeps its own settings and takes over how many updates were made.

    Args:
        seed: of the random-number states under another layout than the saving one, where they cannot be restored.

    Raises:
        ValueError: no checkpoint is there, or it is of another model.
    """
    check_architecture(directory, architecture)
    state = _sharded_state(chunks, optimizer, _metadata(), is_loading=True)
    loaded = dist_checkpointing.load(state, str(directory))
    for index, chunk in enumerate(chunks):
        unwrap(chunk).load_state_dict(loaded[f"model{index}"])
    optimizer.megatron.load_state_dict(loaded["optimizer"])
    optimizer.resume_schedule(loaded["scheduler"])
    if read_facts(directory)["layout"] == layout.sizes():
        _restore_rng_state(torch.load(directory / "rng" / f"{layout.rank:05d}.pt", weights_only=True))
    else:
        seed_ranks(seed)
        if layout.rank == 0:
            log.warning("%s was saved under another layout: random-number states start from the seed", directory)


def _metadata() -> dict[str, Any]:
    """How megatron-core shards what it saves: the one form of optimizer state that loads under any layout."""
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": True,
        "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True),
    }


def _sharded_state(
    chunks: list[DistributedDataParallel], optimizer: Optimizer, metadata: dict[str, Any], *, is_loading: bool = False
) -> dict[str, Any]:
    state: dict[str, Any] = {
        f"model{index}": unwrap(chunk).sharded_state_dict(metadata=metadata) for index, chunk in enumerate(chunks)
    }
    state["optimizer"] = optimizer.megatron.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)
    state["scheduler"] = optimizer.scheduler.state_dict()
    return state


def _rng_state() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {
        "cpu": torch.get_rng_state(),
        "cuda": cuda,
        "tracker": megatron_random.get_cuda_rng_tracker().get_states(),
    }


def _restore_rng_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
    megatron_random.get_cuda_rng_tracker().set_states(state["tracker"])
