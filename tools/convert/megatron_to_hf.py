"""Converts a torch_dist checkpoint, converted or saved by a run, to a Hugging Face checkpoint.

1. The checkpoint is checked against the config.json of its model.
2. Processes write safetensors files, assembling each tensor from its chunks, read them back and compare checksums.
3. The index, the config and the tokenizer are added, and the folder is renamed.

A process holds 3 times the largest Megatron tensor: the tensor, the same in Hugging Face's layout, and one of these
cast.
"""

from collections.abc import Mapping, Sequence, Set
from functools import partial as bind
from pathlib import Path
from typing import Any

from slimrl_tools.convert.conversion import Plan, Say, write_in_parallel
from slimrl_tools.convert.options import Options
from slimrl_tools.convert.output_folder import output_folder, source_files
from slimrl_tools.convert.safetensors_writer import safetensors_writer
from slimrl_tools.open_checkpoint import FoundCheckpoint, check_model, find_checkpoint
from slimrl_tools.torch_dist import schema_of_stored

from slimrl.checkpoints.hf_check import check_tensors
from slimrl.checkpoints.hf_checkpoint import open_hf_checkpoint, open_stored
from slimrl.checkpoints.other_files import copy_other_files
from slimrl.checkpoints.safetensors_file import spec_bytes
from slimrl.checkpoints.safetensors_folder import (
    MAX_SHARD_BYTES,
    SafetensorsFolder,
    plan_safetensors_files,
    write_index,
)
from slimrl.checkpoints.stacked_experts import stacks_of
from slimrl.checkpoints.torch_dist.reader import StoredWeights
from slimrl.checkpoints.torch_dist.safe_pickle import read_metadata
from slimrl.checkpoints.wrapped_folder import whole_specs
from slimrl.config.wrapper import wrapper_of
from slimrl.data.model_weights import TensorSpec
from slimrl.models.family import Family, family_of
from slimrl.models.hf_config import plain_config, write_hf_config
from slimrl.models.weight_map import WeightMap


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
    """Convert, or only describe the output.

    Args:
        shard_bytes: tensor bytes per file at most; a larger tensor gets a file of its own.
        hf_dir: folder with config.json and tokenizer; None for the copy in the checkpoint.

    Raises:
        ValueError: the source or the output folder is refused; nothing was written.
        OSError: the disk is full, or a file reads back differently.
    """
    found = find_checkpoint(src, hf_dir)
    if found.format != "torch_dist":
        raise ValueError(f"{src}: is a Hugging Face checkpoint already; `convert hf-to-megatron` converts it")
    if found.path.parent == src and found.path.name != "trainer":
        say(f"{src}: the newest iteration is taken, {found.path.name}")
    check_model(found)
    config = found.hf_config()
    family = family_of(config)
    weight_map = family.weight_map(config, mtp=True)
    metadata = read_metadata(found.path)
    stored = found.path, metadata, schema_of_stored(found.path, metadata, config)
    with StoredWeights(*stored) as reader:
        missing = weight_map.hf_tensors.keys() - reader.specs.keys()
        from_hf = _mtp_from_hf(found, family, config, missing, say) if missing else {}
        sources = {**from_hf, **reader.specs}
    text = _specs(weight_map, sources, options.dtype)
    specs = stacks_of(weight_map).stored_specs(text) if weight_map.stacked else _whole_specs(found, config, text)
    files = plan_safetensors_files(specs, shard_bytes)
    plan = Plan(
        out=out,
        num_tensors=len(specs),
        files={name: sum(map(spec_bytes, group)) for name, group in files.items()},
        largest_bytes=_largest_held(weight_map, sources, text),
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
        write_in_parallel(
            bind(
                safetensors_writer,
                stored,
                found.hf_dir,
                frozenset(from_hf),
                weight_map.originals,
                text if wrapper_of(config) else None,
                text if weight_map.stacked else (),
            ),
            files,
            plan.files,
            partial,
            title="convert",
            processes=options.processes,
            check=options.check,
        )
        write_index(partial, files)
        copy_other_files(found.hf_dir, partial)
        write_hf_config(partial, plain_config(config, text[0].dtype))
        with SafetensorsFolder(partial) as folder:
            if folder.specs != {spec.name: spec for spec in specs}:
                raise OSError(f"{partial}: the files do not hold the tensors that were written")


def _mtp_from_hf(
    found: FoundCheckpoint, family: Family, hf_config: dict[str, Any], missing: Set[str], say: Say
) -> dict[str, TensorSpec]:
    """The missing layers for multi-token prediction, which training leaves out, if the Hugging Face folder has them.

    Raises:
        ValueError: the folder has the weights of another model.
    """
    specs: dict[str, TensorSpec] = {}
    assert found.hf_dir is not None
    if any(found.hf_dir.glob("*.safetensors")):
        with open_hf_checkpoint(found.hf_dir) as other:
            if check_tensors(other, family, hf_config):
                specs = {name: other.specs[name] for name in missing}
    outcome = f"copied from {found.hf_dir}" if specs else "left out; --hf DIR takes them from another checkpoint"
    say(f"{found.path} has no layers for multi-token prediction; their {len(missing)} tensors are {outcome}")
    return specs


def _whole_specs(found: FoundCheckpoint, hf_config: dict[str, Any], text: Sequence[TensorSpec]) -> Sequence[TensorSpec]:
    """What is written: of a wrapped model in the form of the Hugging Face folder, with its tensors of other modalities.

    Raises:
        ValueError: the folder has no such tensors.
    """
    wrapper = wrapper_of(hf_config)
    if wrapper is None:
        return text
    assert found.hf_dir is not None
    if not any(found.hf_dir.glob("*.safetensors")):
        raise ValueError(
            f"{found.path}: the text model of a {wrapper.model_type}; its other tensors are in the checkpoint that it "
            "came from. Give that one with --hf"
        )
    with open_stored(found.hf_dir) as form:
        return whole_specs(form, text)


def _specs(weight_map: WeightMap, sources: Mapping[str, TensorSpec], dtype: str | None) -> list[TensorSpec]:
    """The tensors to write, in order; copies only with the layers for multi-token prediction, which hold them."""
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
    """Bytes of the largest Megatron tensor, as stored or as written."""
    written = {spec.name: spec for spec in specs}
    return max(
        sum(spec_bytes(held[tensor.name]) for tensor in entry.hf if tensor.name in held)
        for entry in weight_map.entries
        for held in (sources, written)
    )
