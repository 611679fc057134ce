"""A trained model as a Hugging Face checkpoint folder, complete or absent."""

import json
from pathlib import Path

import torch.distributed as dist

from slimrl.data.protocols import WeightSource
from slimrl.models.hf_checkpoint import open_hf_checkpoint
from slimrl.models.hf_config import plain_config, read_hf_config
from slimrl.models.other_files import copy_other_files
from slimrl.models.safetensors_folder import write_safetensors
from slimrl.models.whole_folder import whole_folder
from slimrl.trainer.carried import CarriedTensors


def export_hf(source: WeightSource, src_model_dir: Path, out_dir: Path) -> None:
    """Write the source's weights with the configuration, tokenizer and code of `src_model_dir`; all ranks call it.

    The weights are written as the trainer has them: of a checkpoint in block FP8, what comes out is plain.
    Layers for multi-token prediction, which are not trained, are carried over from `src_model_dir` (see carried.py).
    Everything is written beside `out_dir` and renamed at the end, so that no half-written folder ever has its name.

    Raises:
        ValueError: `out_dir` exists.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    _refuse_existing(out_dir, rank)
    if rank == 0:
        _write(source, src_model_dir, out_dir)
    else:
        for _ in source.tensors():
            pass
    if dist.is_initialized():
        dist.barrier()


def _refuse_existing(out_dir: Path, rank: int) -> None:
    """Rank 0 looks, so that all ranks decide alike."""
    exists = [rank == 0 and out_dir.exists()]
    if dist.is_initialized():
        dist.broadcast_object_list(exists)
    if exists[0]:
        raise ValueError(f"{out_dir}: exists; an export never overwrites")


def _write(source: WeightSource, src_model_dir: Path, out_dir: Path) -> None:
    specs, config = source.specs(), read_hf_config(src_model_dir)
    with whole_folder(out_dir) as partial, open_hf_checkpoint(src_model_dir) as reader:
        carried = CarriedTensors(reader, config, specs, specs[0].dtype)
        write_safetensors(partial, carried.specs(), carried.tensors(source.tensors()))
        (partial / "config.json").write_text(json.dumps(plain_config(config, specs[0].dtype), indent=2) + "\n")
        copy_other_files(src_model_dir, partial)
