"""Checkpoints of a training run: weights, optimizer, schedule and random-number states, loadable under any layout.

A checkpoint is a folder:
- `checkpoint.json`: the model's architecture and the layout that saved it;
- `hf/`: the model's config and tokenizer, needed to convert it into a Hugging Face checkpoint;
- `rng/`: random-number states by rank, restored where the layout is the same;
- the rest: megatron-core's distributed format (torch_dist); each rank writes its shards.
It is written under a temporary name next to the final one and renamed when complete.
"""

import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import random as megatron_random
from torch import nn

from slimrl.checkpoints.digests import FileDigest
from slimrl.checkpoints.other_files import copy_other_files
from slimrl.checkpoints.torch_dist.chunks import SHARDING
from slimrl.checkpoints.torch_dist.metadata import CONFIG, CONFIG_NAME, content_metadata
from slimrl.checkpoints.torch_dist.safe_pickle import without_code
from slimrl.models.adapters import is_adapter
from slimrl.models.architecture import FACTS_FILE, HF_SUBFOLDER, check_architecture, read_facts
from slimrl.models.hf_config import plain_config, read_hf_config, write_hf_config
from slimrl.trainer.build import unwrap
from slimrl.trainer.checkpointing.failures import failing_together
from slimrl.trainer.checkpointing.writing import CheckpointWriting
from slimrl.trainer.layout.parallel import Layout, seed_ranks
from slimrl.trainer.optimizer import Optimizer
from slimrl.trainer.value_head import is_value_head

BY_RANK = "dp_reshardable"
"""megatron-core's name for states of the optimizer that each rank writes as it has them"""
_OPTIMIZER = "distrib_optim_sharding_type"
_EXTRA = "._extra_state"
"""Part of the names of modules' own states; for experts a number follows it."""

log = logging.getLogger(__name__)


def save(
    directory: Path,
    chunks: list[DistributedDataParallel],
    optimizer: Optimizer,
    layout: Layout,
    architecture: dict[str, Any],
    model_path: Path | None = None,
) -> dict[str, FileDigest]:
    """Write a checkpoint; every rank calls it, on a shared file system. As `begin`, and waits until it is written.

    Returns:
        Checksums of the files that this rank wrote, by name in the folder. The files are read back while they are in
        the node's page cache.

    Raises:
        ValueError: the folder exists.
        NotWritten: a rank could not write, for example to a full disk; on all ranks.
    """
    writing = begin(directory, chunks, optimizer, layout, architecture, model_path)
    writing.write()
    return writing.finish()


def begin(
    directory: Path,
    chunks: list[DistributedDataParallel],
    optimizer: Optimizer,
    layout: Layout,
    architecture: dict[str, Any],
    model_path: Path | None = None,
    *,
    leads: bool | None = None,
    same_layout: bool = False,
) -> CheckpointWriting:
    """Begin a checkpoint; every rank calls it, on a shared file system or with a folder of its node.

    Args:
        directory: must not exist yet.
        architecture: from architecture_of.
        model_path: Hugging Face folder whose config and tokenizer are copied into the checkpoint.
        leads: whether this rank, of those that share the folder, makes it; None for the first of all ranks.
        same_layout: no other layout will load it, so that each rank writes the optimizer's states that it has, and none
            gathers them.

    Raises:
        ValueError: the folder exists.
        NotWritten: a rank could not make the folder, or write the first files; on all ranks.
    """
    leads = layout.rank == 0 if leads is None else leads
    optimizer.create_state()
    by_rank = {_OPTIMIZER: BY_RANK} if same_layout and optimizer.is_on_all_ranks() else {}
    if directory.exists():
        raise ValueError(f"{directory}: exists already")
    partial = directory.with_name(f".{directory.name}.partial")
    with failing_together():
        if leads:
            shutil.rmtree(partial, ignore_errors=True)
            (partial / "rng").mkdir(parents=True)
        if layout.rank == 0:
            facts = {"architecture": architecture, "layout": layout.sizes(), **by_rank}
            (partial / FACTS_FILE).write_text(json.dumps(facts, indent=2, sort_keys=True) + "\n")
            (partial / CONFIG_NAME).write_text(json.dumps(CONFIG))
            if model_path is not None:
                _copy_hf_files(model_path, partial / HF_SUBFOLDER)
    # torch does not say why it could not write a file.
    rng = BytesIO()
    torch.save(_rng_state(), rng)
    metadata = _metadata(by_rank)
    content = {name: value for name, value in metadata.items() if name != "dp_cp_group"}
    request = dist_checkpointing.save(
        _sharded_state(chunks, optimizer, metadata),
        str(partial),
        async_sharded_save=True,
        # The other strategy, of a package for NVIDIA's clusters, spawns processes.
        async_strategy="mcore",
        content_metadata=content,
    )
    return CheckpointWriting(partial, directory, layout.rank, rng.getvalue(), request, leads=leads)


def load(
    directory: Path,
    chunks: list[DistributedDataParallel],
    optimizer: Optimizer,
    layout: Layout,
    architecture: dict[str, Any],
    *,
    seed: int,
) -> None:
    """Load a checkpoint, saved under this or another layout; every rank calls it.

    The learning-rate schedule keeps its settings and loads the number of updates. FP8 scales begin anew.

    Args:
        seed: of the random-number states, if the checkpoint's cannot be restored because its layout differs.

    Raises:
        ValueError: there is no checkpoint, or it is of another model.
    """
    check_architecture(directory, architecture)
    facts = read_facts(directory)
    state = _sharded_state(chunks, optimizer, _metadata(facts), is_loading=True)
    with without_code(directory):
        loaded = dist_checkpointing.load(state, str(directory))
    for index, chunk in enumerate(chunks):
        unwrap(chunk).load_state_dict(_without_scales(loaded[f"model{index}"]))
    optimizer.load_state_dict(loaded["optimizer"], loaded["scheduler"])
    if facts["layout"] == layout.sizes():
        _restore_rng_state(torch.load(directory / "rng" / f"{layout.rank:05d}.pt", weights_only=True))
    else:
        seed_ranks(seed)
        if layout.rank == 0:
            log.warning("%s has another layout: random-number states start from the seed", directory)


def load_weights(directory: Path, chunks: Sequence[nn.Module]) -> None:
    """Load only the weights of a checkpoint, converted or from a run, under any layout; every rank calls it.

    Adapters of the modules, and a critic's head, stay as they are. The optimizer copies the weights: call this before
    it is built, or have it copy them again.

    Raises:
        ValueError: not a checkpoint of megatron-core, or one of another model.
    """
    try:
        with without_code(directory) as stored:
            content = content_metadata(directory, stored)
            metadata = {**_metadata(), "singleton_local_shards": content.get("singleton_local_shards", False)}
            state = {
                model: {name: item for name, item in part.items() if not _is_own(chunk, name)}
                for (model, part), chunk in zip(_model_state(chunks, metadata).items(), chunks, strict=True)
            }
            loaded = dist_checkpointing.load(state, str(directory))
    except (CheckpointingException, KeyError) as error:
        raise ValueError(f"{directory}: not a checkpoint of this model: {error}") from error
    for index, chunk in enumerate(chunks):
        missing, unknown = unwrap(chunk).load_state_dict(_without_scales(loaded[f"model{index}"]), strict=False)
        assert not unknown, unknown
        assert all(_is_own(chunk, name) for name in missing), missing


def _without_scales(state: dict[str, Any]) -> dict[str, Any]:
    """The state without the FP8 scales of delayed scaling, which begin anew.

    Transformer Engine keeps them as a pickle that it refuses to load (pytorch/_extra_state.py). It leaves a module as
    it is for an empty state, and expects one.
    """
    return {name: torch.empty(0, dtype=torch.uint8) if _EXTRA in name else item for name, item in state.items()}


def _is_own(chunk: nn.Module, name: str) -> bool:
    """Whether a parameter is one that slimrl adds to a model."""
    return is_adapter(name) or is_value_head(unwrap(chunk), name)


def _metadata(facts: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """How megatron-core shards a checkpoint, of the facts in its FACTS_FILE."""
    optimizer = (facts or {}).get(_OPTIMIZER, SHARDING[_OPTIMIZER])
    groups = {"dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)}
    return {**SHARDING, _OPTIMIZER: optimizer, **groups}


def _model_state(chunks: Sequence[nn.Module], metadata: dict[str, Any]) -> dict[str, Any]:
    return {f"model{index}": unwrap(chunk).sharded_state_dict(metadata=metadata) for index, chunk in enumerate(chunks)}


def _copy_hf_files(model_path: Path, folder: Path) -> None:
    folder.mkdir()
    # The checkpoint's weights are not quantized, even if the model's are.
    config = plain_config(read_hf_config(model_path))
    write_hf_config(folder, config)
    copy_other_files(model_path, folder)


def _sharded_state(
    chunks: list[DistributedDataParallel], optimizer: Optimizer, metadata: dict[str, Any], *, is_loading: bool = False
) -> dict[str, Any]:
    state = _model_state(chunks, metadata)
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
