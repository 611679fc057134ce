"""Writes the safetensors files of an output in one process. It needs no Megatron, whose import takes seconds."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch
import xxhash
from slimrl_tools.allocator import keep_freed_memory
from slimrl_tools.convert.conversion import WriteFile, Written
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from slimrl.checkpoints.checkpoint_reader import read_blocks
from slimrl.checkpoints.digests import Span
from slimrl.checkpoints.hf_checkpoint import open_hf_checkpoint, open_stored
from slimrl.checkpoints.read_ahead import read_ahead
from slimrl.checkpoints.safetensors_file import TensorLocation, spec_bytes, write_safetensors_file
from slimrl.checkpoints.stacked_experts import read_each, restacked
from slimrl.checkpoints.tensor_bytes import bytes_of
from slimrl.checkpoints.torch_dist.chunks import ShardSchema
from slimrl.checkpoints.torch_dist.reader import StoredWeights
from slimrl.checkpoints.wrapped_folder import whole_tensors
from slimrl.data.model_weights import TensorSpec


@contextmanager
def safetensors_writer(
    stored: tuple[Path, Metadata, ShardSchema],
    hf_dir: Path,
    from_hf: frozenset[str],
    originals: Mapping[str, str],
    text: Sequence[TensorSpec] | None = None,
    apart: Sequence[TensorSpec] = (),
) -> Iterator[WriteFile[list[TensorSpec]]]:
    """From a torch_dist checkpoint.

    Args:
        stored: arguments of StoredWeights.
        from_hf: names of tensors that are read from the folder `hf_dir` instead.
        originals: name of a copy -> name of the tensor that it repeats.
        text: specs of the text model of a wrapped one, whose form and other tensors are those of `hf_dir`.
        apart: specs of all tensors, those of each expert by itself, of a model whose files hold them as one.
    """
    keep_freed_memory()
    with (
        StoredWeights(*stored) as reader,
        open_hf_checkpoint(hf_dir) if from_hf else nullcontext() as other,
        open_stored(hf_dir) if text else nullcontext() as form,
    ):

        def tensors(specs: Sequence[TensorSpec]) -> Iterable[tuple[str, Tensor]]:
            for spec in specs:
                original = originals.get(spec.name, spec.name)
                source = other if other and original in from_hf else reader
                for block in read_blocks(source, original, tuple(slice(0, size) for size in spec.shape)):
                    yield spec.name, block

        produce: Callable[[Sequence[TensorSpec]], Iterable[tuple[str, Tensor]]] = tensors
        if apart:
            _, produce = restacked(stored[2].weight_map, apart, partial(read_each, reader))
        yield lambda file, specs, written: write_hashed(
            file, specs, whole_tensors(form, specs, text or (), produce), written
        )


def write_hashed(
    file: Path, specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, Tensor]], written: Written
) -> None:
    """Write a safetensors file. A thread makes, casts and hashes each tensor while the one before is written.

    Args:
        tensors: in the order of `specs`, whole or in consecutive blocks of rows.

    Raises:
        OSError: the disk is full, or writing failed.
    """
    digests: dict[str, str] = {}

    def tensor_written(descriptor: int, location: TensorLocation) -> None:
        name = location.spec.name
        written(descriptor, Span(name=name, start=location.start, length=location.nbytes, digest=digests[name]))

    write_safetensors_file(file, specs, read_ahead(_hashed(specs, tensors, digests)), tensor_written)


def _hashed(
    specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, Tensor]], digests: dict[str, str]
) -> Iterator[tuple[str, Tensor]]:
    """The blocks as they are written; adds the checksum of each whole tensor to `digests`."""
    remaining = iter(tensors)
    for spec in specs:
        digest, left = xxhash.xxh3_128(), spec_bytes(spec)
        while True:
            name, block = next(remaining)
            cast = block.to(getattr(torch, spec.dtype)).contiguous()
            digest.update(bytes_of(cast))
            left -= cast.nbytes
            if left <= 0:
                digests[name] = digest.hexdigest()
            yield name, cast
            # Freed before the next is made.
            del block, cast
            if left <= 0:
                break
