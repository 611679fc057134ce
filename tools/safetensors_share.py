"""One process's share of the safetensors files made of a torch_dist checkpoint. It needs no Megatron."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial as bind
from pathlib import Path

import torch
from slimrl_tools.conversion import Finisher, due_files, record_file
from slimrl_tools.progress import Advance
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from slimrl.data.protocols import TensorSpec
from slimrl.models.checkpoint_reader import CheckpointReader, read_whole
from slimrl.models.hf_checkpoint import open_hf_checkpoint
from slimrl.models.safetensors_file import read_header, write_safetensors_file
from slimrl.models.shard_pieces import ShardSchema
from slimrl.models.torch_dist_files import stored_digest, tensor_digest
from slimrl.models.torch_dist_reader import StoredWeights

Stored = tuple[Path, Metadata, ShardSchema]
"""What StoredWeights is made of."""


def convert_share(
    stored: Stored,
    hf_dir: Path,
    carried: frozenset[str],
    originals: Mapping[str, str],
    partial: Path,
    check: bool,
    files: dict[str, list[TensorSpec]],
    advance: Advance,
) -> None:
    """Write those files that are not whole yet, and read all of them back if they are to be checked."""
    due = due_files(partial, list(files))
    for name in files.keys() - due if check else ():
        check_file(partial / name, json.loads(record_file(partial, name).read_text()), advance)

    def finish(name: str, digests: Mapping[str, str]) -> None:
        if check:
            check_file(partial / name, digests, advance)
        write_digests(record_file(partial, name), digests)

    other = open_hf_checkpoint(hf_dir) if carried else None
    with StoredWeights(*stored) as reader, Finisher() as finisher:
        for name in due:
            digests: dict[str, str] = {}
            group = files[name]
            tensors = _tensors(group, lambda spec: _read(reader, other, carried, originals, spec), digests, advance)
            write_safetensors_file(partial / name, group, tensors)
            finisher.add(partial / name, bind(finish, name, digests))
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
    return read_whole(source, original).to(getattr(torch, spec.dtype)).contiguous()


def _tensors(
    group: Sequence[TensorSpec], read: Callable[[TensorSpec], Tensor], digests: dict[str, str], advance: Advance
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file as they are due; their checksums go into `digests`."""
    for spec in group:
        tensor = read(spec)
        digests[spec.name] = tensor_digest(tensor)
        nbytes = tensor.nbytes
        yield spec.name, tensor
        # Gone before the next is made.
        del tensor
        advance(nbytes)


def write_digests(record: Path, digests: Mapping[str, str]) -> None:
    """The record of a file: checksums by tensor."""
    new = record.with_suffix(".new")
    new.write_text(json.dumps(digests))
    new.replace(record)


def check_file(file: Path, digests: Mapping[str, str], advance: Advance) -> None:
    """Compare the tensors of a file with the checksums of what was written.

    Raises:
        OSError: they are not the same.
    """
    places = read_header(file)
    with file.open("rb", buffering=0) as stream:
        for name, digest in digests.items():
            if stored_digest(stream, places[name].start, places[name].nbytes) != digest:
                raise OSError(f"{file}: {name} reads back differently than it was written")
            advance(places[name].nbytes)
