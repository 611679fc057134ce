"""One process's share of the safetensors files made of a torch_dist checkpoint. It needs no Megatron."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial as bind
from pathlib import Path

import torch
from slimrl_tools.conversion import Finisher, record_file
from slimrl_tools.progress import Advance
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from slimrl.data.protocols import TensorSpec
from slimrl.models.checkpoint_reader import CheckpointReader
from slimrl.models.hf_checkpoint import open_hf_checkpoint
from slimrl.models.safetensors_file import write_safetensors_file
from slimrl.models.safetensors_folder import SafetensorsFolder
from slimrl.models.shard_pieces import ShardSchema
from slimrl.models.torch_dist_files import tensor_digest
from slimrl.models.torch_dist_reader import StoredWeights

Stored = tuple[Path, Metadata, ShardSchema]
"""What StoredWeights is made of."""


def write_share(
    stored: Stored,
    hf_dir: Path,
    carried: frozenset[str],
    originals: Mapping[str, str],
    partial: Path,
    files: dict[str, list[TensorSpec]],
    advance: Advance,
) -> None:
    other = open_hf_checkpoint(hf_dir) if carried else None
    with StoredWeights(*stored) as reader, Finisher() as finisher:
        for name, group in files.items():
            digests: dict[str, str] = {}
            tensors = _tensors(group, lambda spec: _read(reader, other, carried, originals, spec), digests, advance)
            write_safetensors_file(partial / name, group, tensors)
            finisher.add(partial / name, bind(write_digests, record_file(partial, name), digests))
    if other is not None:
        other.close()


def _read(
    reader: CheckpointReader,
    other: CheckpointReader | None,
    carried: frozenset[str],
    originals: Mapping[str, str],
    spec: TensorSpec,
) -> Tensor:
    original = originals.get(spec.name, spec.name)
    source = other if other is not None and original in carried else reader
    return source.read(original, _whole(spec)).to(getattr(torch, spec.dtype)).contiguous()


def _tensors(
    group: Sequence[TensorSpec], read: Callable[[TensorSpec], Tensor], digests: dict[str, str], advance: Advance
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file as they are due; their checksums go into `digests`."""
    for spec in group:
        tensor = read(spec)
        digests[spec.name] = tensor_digest(tensor)
        yield spec.name, tensor
        advance(tensor.nbytes)


def write_digests(record: Path, digests: Mapping[str, str]) -> None:
    """The record of a file: checksums by tensor."""
    new = record.with_suffix(".new")
    new.write_text(json.dumps(digests))
    new.replace(record)


def check_share(partial: Path, specs: Sequence[TensorSpec], names: Sequence[str], advance: Advance) -> None:
    """Names, shapes and dtypes of the whole folder, checksums of these files."""
    expected = {spec.name: spec for spec in specs}
    with SafetensorsFolder(partial) as folder:
        if folder.specs != expected:
            raise OSError(f"{partial}: the files do not hold what was written")
        for name in names:
            for tensor_name, digest in json.loads(record_file(partial, name).read_text()).items():
                tensor = folder.read(tensor_name, _whole(expected[tensor_name]))
                if folder.file_of(tensor_name) != name or tensor_digest(tensor) != digest:
                    raise OSError(f"{partial / name}: {tensor_name} reads back differently than it was written")
                advance(tensor.nbytes)


def _whole(spec: TensorSpec) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in spec.shape)
