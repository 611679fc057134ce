"""One process's part of the safetensors files made of a torch_dist checkpoint. It needs no Megatron."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial as bind
from pathlib import Path

import torch
from slimrl_tools.allocator import keep_freed_memory
from slimrl_tools.conversion import due_files, record_file
from slimrl_tools.finisher import Finisher
from slimrl_tools.progress import Advance
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from slimrl.data.protocols import TensorSpec
from slimrl.models.checkpoint_reader import CheckpointReader, read_whole
from slimrl.models.digests import Span, check_spans, tensor_digest
from slimrl.models.hf_checkpoint import open_hf_checkpoint
from slimrl.models.read_ahead import read_ahead
from slimrl.models.safetensors_file import Place, read_header, write_safetensors_file
from slimrl.models.shard_pieces import ShardSchema
from slimrl.models.torch_dist_reader import StoredWeights

Stored = tuple[Path, Metadata, ShardSchema]
"""What StoredWeights is made of."""


def write_part(
    stored: Stored,
    hf_dir: Path,
    carried: frozenset[str],
    originals: Mapping[str, str],
    partial: Path,
    check: bool,
    files: dict[str, list[TensorSpec]],
    advance: Advance,
) -> None:
    """Write those files that are not whole yet, and read all of them back if they are to be checked.

    Args:
        carried: names of tensors that the folder `hf_dir` gives instead of the checkpoint.
        originals: name of a copy -> name of what it repeats.
    """
    keep_freed_memory()
    due = due_files(partial, list(files))
    for name in files.keys() - due if check else ():
        check_file(partial / name, json.loads(record_file(partial, name).read_text()), advance)
    other = open_hf_checkpoint(hf_dir) if carried else None
    with StoredWeights(*stored) as reader, Finisher(advance if check else None) as finisher:
        for name in due:
            tensors = ((spec.name, _read(reader, other, carried, originals, spec)) for spec in files[name])
            write_hashed(partial, name, files[name], tensors, finisher, advance)
    if other is not None:
        other.close()


def write_hashed(
    partial: Path,
    name: str,
    specs: Sequence[TensorSpec],
    tensors: Iterable[tuple[str, Tensor]],
    finisher: Finisher,
    advance: Advance,
) -> None:
    """Write a file into the unfinished output `partial`, and have it checked and recorded.

    Args:
        specs: what it holds, in order.
        tensors: the same; each is made, cast and hashed in another thread while the one before is written.

    Raises:
        OSError: the disk is full, or writing failed.
    """
    file, digests = partial / name, dict[str, str]()

    def written(descriptor: int, place: Place) -> None:
        finisher.written(descriptor, file, _span(place, digests))
        advance(place.nbytes)

    write_safetensors_file(file, specs, read_ahead(_hashed(specs, tensors, digests)), written)
    finisher.finish(file, bind(write_digests, record_file(partial, name), digests))


def _hashed(
    specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, Tensor]], digests: dict[str, str]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors as they are written; their checksums go into `digests`."""
    for spec, (name, tensor) in zip(specs, tensors, strict=True):
        cast = tensor.to(getattr(torch, spec.dtype)).contiguous()
        digests[name] = tensor_digest(cast)
        yield name, cast
        # Gone before the next is made.
        del tensor, cast


def _span(place: Place, digests: Mapping[str, str]) -> Span:
    name = place.spec.name
    return Span(name=name, start=place.start, length=place.nbytes, digest=digests[name])


def _read(
    reader: CheckpointReader,
    other: CheckpointReader | None,
    carried: frozenset[str],
    originals: Mapping[str, str],
    spec: TensorSpec,
) -> Tensor:
    original = originals.get(spec.name, spec.name)
    source = other if other is not None and original in carried else reader
    return read_whole(source, original)


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
    spans = (_span(places[name], digests) for name in digests)
    with file.open("rb", buffering=0) as stream:
        check_spans(stream.fileno(), file, spans, advance)
