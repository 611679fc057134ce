"""A torch_dist checkpoint, converted or saved by a run, as a Hugging Face checkpoint.

1. The checkpoint is compared with the config.json of its model.
2. Processes write safetensors files, each tensor put together from its blocks when it is due.
3. Every file is read back and compared with the checksums of what was written.
4. The index, the config and the tokenizer are added, and the folder gets its name.
"""

import json
import shutil
from collections.abc import Mapping, Sequence, Set
from functools import partial as bind
from pathlib import Path
from typing import Any

from slimrl_tools.conversion import (
    RECORDS,
    Options,
    Plan,
    Say,
    run_plan,
)
from slimrl_tools.open_checkpoint import FoundCheckpoint, check_model, find_checkpoint
from slimrl_tools.output_folder import output_folder, refuse_existing, source_files
from slimrl_tools.safetensors_writer import write_part

from slimrl.data.protocols import TensorSpec
from slimrl.models.checkpoint import check_tensors
from slimrl.models.family import Family, family_of
from slimrl.models.hf_checkpoint import open_hf_checkpoint
from slimrl.models.hf_config import plain_config
from slimrl.models.other_files import copy_other_files
from slimrl.models.safetensors_file import spec_bytes
from slimrl.models.safetensors_folder import MAX_SHARD_BYTES, SafetensorsFolder, plan_files, write_index
from slimrl.models.torch_dist_reader import StoredWeights, read_metadata
from slimrl.models.weight_map import WeightMap
from slimrl.trainer.torch_dist import schema_of_stored

COPIES_HELD = 3
"""Largest Megatron tensors that a process holds: the tensor, the same in Hugging Face's layout, and one of these cast;
or the tensor, a stored block of it and the bytes that torch makes that of."""


def megatron_to_hf(
    src: Path,
    out: Path,
    options: Options,
    *,
    shard_bytes: int = MAX_SHARD_BYTES,
    hf_dir: Path | None = None,
    dry_run: bool = False,
    say: Say = print,
) -> None:
    """Convert, or only say what would be written.

    Args:
        shard_bytes: tensor bytes per file at most; a larger tensor gets a file of its own.
        hf_dir: folder with config.json and tokenizer; None for the copy in the checkpoint.

    Raises:
        ValueError: the source or the output folder is not what it should be; nothing was written.
        OSError: the disk is full, or what was written reads back differently.
    """
    refuse_existing(out)
    found = find_checkpoint(src, hf_dir)
    if found.format != "torch_dist":
        raise ValueError(f"{src}: a Hugging Face checkpoint already")
    check_model(found)
    config = found.hf_config()
    family = family_of(config)
    weight_map = family.weight_map(config, mtp=True)
    metadata = read_metadata(found.path)
    stored = found.path, metadata, schema_of_stored(found.path, metadata, config)
    with StoredWeights(*stored) as reader:
        missing = weight_map.hf_tensors.keys() - reader.specs.keys()
        carried = _carried(found, family, config, missing, say) if missing else {}
        sources = {**carried, **reader.specs}
    specs = _specs(weight_map, sources, options.dtype)
    files = plan_files(specs, shard_bytes)
    plan = Plan(
        out=out,
        num_tensors=len(specs),
        files={name: sum(map(spec_bytes, group)) for name, group in files.items()},
        largest_bytes=_largest_held(weight_map, sources, specs),
        copies_held=COPIES_HELD,
    )
    if dry_run:
        say(plan.describe(options.processes))
        return
    assert found.hf_dir is not None
    job = {
        "command": "convert megatron-to-hf",
        "source": source_files(found.path),
        "hf_dir": [str(found.hf_dir), source_files(found.hf_dir)],
        "dtype": options.dtype,
        "shard_bytes": shard_bytes,
    }
    with output_folder(out, job, resume=options.resume) as partial:
        convert = bind(
            write_part, stored, found.hf_dir, frozenset(carried), _originals(weight_map), partial, options.check
        )
        run_plan(convert, plan, files, partial, options)
        write_index(partial, files)
        copy_other_files(found.hf_dir, partial)
        (partial / "config.json").write_text(json.dumps(plain_config(config, specs[0].dtype), indent=2) + "\n")
        with SafetensorsFolder(partial) as folder:
            if folder.specs != {spec.name: spec for spec in specs}:
                raise OSError(f"{partial}: the files do not hold what was written")
        shutil.rmtree(partial / RECORDS)


def _carried(
    found: FoundCheckpoint, family: Family, hf_config: dict[str, Any], missing: Set[str], say: Say
) -> dict[str, TensorSpec]:
    """What the Hugging Face folder gives of the tensors that a torch_dist checkpoint lacks: all of them, or none.

    They are the layers for multi-token prediction, which training leaves out. A folder that has weights must have those
    of this model.
    """
    carried: dict[str, TensorSpec] = {}
    assert found.hf_dir is not None
    if any(found.hf_dir.glob("*.safetensors")):
        with open_hf_checkpoint(found.hf_dir) as other:
            if check_tensors(other, family, hf_config):
                carried = {name: other.specs[name] for name in missing}
    what = f"taken unchanged from {found.hf_dir}" if carried else "left out, give their checkpoint with --hf"
    say(f"{found.path} has no layers for multi-token prediction; their {len(missing)} tensors are {what}")
    return carried


def _specs(weight_map: WeightMap, sources: Mapping[str, TensorSpec], dtype: str | None) -> list[TensorSpec]:
    """What is written, in order; copies only beside the layers for multi-token prediction, which hold them."""
    with_mtp = weight_map.hf_tensors.keys() <= sources.keys()
    specs = []
    for tensor in weight_map.hf_tensors.values():
        if tensor.name not in sources:
            continue
        own = sources[tensor.name].dtype
        written = own if dtype is None else tensor.dtype or dtype
        for name in tensor.names if with_mtp else (tensor.name,):
            specs.append(TensorSpec(name=name, shape=tensor.shape, dtype=written))
    return specs


def _largest_held(weight_map: WeightMap, sources: Mapping[str, TensorSpec], specs: Sequence[TensorSpec]) -> int:
    """Bytes of the largest Megatron tensor, as it is stored or as it is written."""
    written = {spec.name: spec for spec in specs}
    return max(
        sum(spec_bytes(held[tensor.name]) for tensor in entry.hf if tensor.name in held)
        for entry in weight_map.entries
        for held in (sources, written)
    )


def _originals(weight_map: WeightMap) -> dict[str, str]:
    """Name of a copy -> name of what it repeats."""
    return {copy: tensor.name for tensor in weight_map.hf_tensors.values() for copy in tensor.copies}
