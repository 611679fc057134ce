"""Exports the trained model as a Hugging Face checkpoint folder, and its adapters as PEFT's in a subfolder."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from slimrl.base.atomic import atomic_folder
from slimrl.checkpoints.hf_checkpoint import open_hf_checkpoint, open_stored
from slimrl.checkpoints.other_files import copy_other_files
from slimrl.checkpoints.safetensors_file import write_safetensors_file
from slimrl.checkpoints.safetensors_folder import write_safetensors
from slimrl.checkpoints.stacked_experts import stacks_of
from slimrl.checkpoints.wrapped_folder import whole_specs, whole_tensors
from slimrl.models.family import family_of
from slimrl.models.hf_config import plain_config, read_hf_config, write_hf_config
from slimrl.trainer.checkpointing.untrained_mtp import UntrainedMtpTensors
from slimrl.trainer.weight_source import MegatronWeightSource

ADAPTER_SUBFOLDER = "adapter"
"""Folder of the adapters within an export: in the export's own folder transformers would load them on top of the model,
which has them merged in."""


@dataclass(frozen=True, kw_only=True)
class ExportedAdapters:
    source: MegatronWeightSource
    config: dict[str, Any]
    """Contents of PEFT's adapter_config.json"""


def export_hf(
    source: MegatronWeightSource,
    src_model_dir: Path,
    out_dir: Path,
    adapters: ExportedAdapters | None = None,
    seen: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write the source's weights with the configuration, tokenizer and code of `src_model_dir`; all ranks call it.

    The weights have the trainer's dtype; those of a model in block FP8, packed INT4 or MXFP4 are not quantized again.
    Layers for multi-token prediction that the source lacks are copied from `src_model_dir` (untrained_mtp.py), and so
    are the tensors of a wrapped model's other modalities.
    The folder is written next to `out_dir` and renamed at the end, so it is complete or absent.

    Args:
        seen: called on rank 0 after each tensor with the numbers of those that are written, and of all.

    Raises:
        ValueError: `out_dir` exists.
    """
    rank = dist.get_rank()
    # Rank 0 checks for all ranks, so that they agree.
    exists = [rank == 0 and out_dir.exists()]
    dist.broadcast_object_list(exists)
    if exists[0]:
        raise ValueError(f"{out_dir}: exists; an export never overwrites")
    if rank == 0:
        _write(source, src_model_dir, out_dir, adapters, seen)
    else:
        for each in (source, *([adapters.source] if adapters else [])):
            for _ in each.tensors():
                pass
    dist.barrier()


def _write(
    source: MegatronWeightSource,
    src_model_dir: Path,
    out_dir: Path,
    adapters: ExportedAdapters | None,
    seen: Callable[[int, int], None],
) -> None:
    specs, config = list(source.layout()), read_hf_config(src_model_dir)
    with (
        atomic_folder(out_dir) as partial,
        open_hf_checkpoint(src_model_dir) as reader,
        open_stored(src_model_dir) as stored,
    ):
        carried = UntrainedMtpTensors(reader, config, specs, specs[0].dtype)
        text, tensors = carried.specs(), carried.tensors(_counted(source.tensors(), len(specs), seen))
        weight_map = family_of(config).weight_map(config)
        if weight_map.stacked:
            stacks = stacks_of(weight_map)
            write_safetensors(partial, stacks.stored_specs(text), stacks.stored_tensors(text, tensors))
        else:
            whole = whole_specs(stored, text)
            write_safetensors(partial, whole, whole_tensors(stored, whole, text, lambda _: tensors))
        write_hf_config(partial, plain_config(config, specs[0].dtype))
        copy_other_files(src_model_dir, partial)
        if adapters is not None:
            _write_adapters(adapters, partial / ADAPTER_SUBFOLDER)


def _counted[T](tensors: Iterable[T], total: int, seen: Callable[[int, int], None]) -> Iterator[T]:
    for done, tensor in enumerate(tensors, 1):
        yield tensor
        seen(done, total)


def _write_adapters(adapters: ExportedAdapters, folder: Path) -> None:
    folder.mkdir()
    tensors = ((name, tensor) for name, tensor in adapters.source.tensors() if tensor is not None)
    write_safetensors_file(folder / "adapter_model.safetensors", list(adapters.source.layout()), tensors)
    (folder / "adapter_config.json").write_text(json.dumps(adapters.config, indent=2) + "\n")
