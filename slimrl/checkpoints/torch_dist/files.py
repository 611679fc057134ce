"""Files of a torch_dist checkpoint: chunks of tensors one after the other, each as torch.save writes a tensor.

1. The schema's chunks are distributed over files of bounded size; the chunks of a shard share a file.
2. A file is written chunk by chunk. Each is made from slices of Hugging Face tensors while the one before is written.
   A chunk that is a block of one Hugging Face tensor is read in blocks of rows, each while the one before is written.

Chunks lack torch's own checksum (the CRC-32 of zip files), which takes longer than all the rest; torch and
megatron-core do not check it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial as bind
from itertools import chain, groupby
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash
from torch import Tensor
from torch.serialization import get_crc32_options, set_crc32_options

from slimrl.base.atomic import WRITE_BYTES, atomic_file
from slimrl.checkpoints.checkpoint_reader import CheckpointReader, read_blocks
from slimrl.checkpoints.digests import Span
from slimrl.checkpoints.file_groups import group_by_bytes
from slimrl.checkpoints.read_ahead import read_ahead
from slimrl.checkpoints.tensor_bytes import bytes_of
from slimrl.checkpoints.torch_dist.chunks import Chunk, ShardSchema, gate_and_up_apart
from slimrl.models.layout_ops import Identity
from slimrl.models.weight_map import Entry

FILE_BYTES = 10**9
"""Default size of a file, in bytes of tensors."""


def plan_distcp_files(
    schema: ShardSchema, dtypes: Sequence[torch.dtype], file_bytes: int = FILE_BYTES
) -> dict[str, list[Chunk]]:
    """File name -> its chunks, in the order of the weight map.

    Args:
        dtypes: of the stored tensors, by entry of the weight map.
        file_bytes: tensor bytes per file at most; a larger shard gets a file of its own.
    """
    shards = [list(group) for _, group in groupby(schema.chunks, key=lambda chunk: (chunk.entry, chunk.shard))]
    files = group_by_bytes(shards, lambda chunks: sum(chunk_bytes(chunk, dtypes) for chunk in chunks), file_bytes)
    return {f"__0_{number}.distcp": list(chain(*group)) for number, group in enumerate(files)}


def chunk_bytes(chunk: Chunk, dtypes: Sequence[torch.dtype]) -> int:
    return chunk.numel * dtypes[chunk.entry].itemsize


def write_distcp_file(
    file: Path,
    chunks: Sequence[Chunk],
    entries: Sequence[Entry],
    dtypes: Sequence[torch.dtype],
    reader: CheckpointReader,
    written: Callable[[int, Span], None],
) -> None:
    """Write one file under a temporary name, renamed when it is whole.

    Holds at most 3 times one shard, in the source's dtype or the stored one, whichever is larger: the source tensors
    and the shard, or the shard and a chunk of it, and the chunk that is being written.

    Args:
        reader: used by another thread meanwhile.
        written: called after each chunk with the file's descriptor, open for reading and writing, and the chunk's span.

    Raises:
        OSError: the disk is full, or writing failed; it names the file, and nothing is left behind.
        ValueError: the source is broken.
    """
    with atomic_file(file) as stream, closing(read_ahead(_blocks(chunks, entries, dtypes, reader))) as blocks:
        for chunk in chunks:
            hashed = _Hashed(stream)
            _save_chunk(chunk, blocks, hashed)
            stream.flush()
            start = stream.tell() - hashed.length
            span = Span(name=chunk.key, start=start, length=hashed.length, digest=hashed.digest.hexdigest())
            written(stream.fileno(), span)


def _blocks(
    chunks: Sequence[Chunk], entries: Sequence[Entry], dtypes: Sequence[torch.dtype], reader: CheckpointReader
) -> Iterator[Tensor]:
    """The chunks as they are stored, in consecutive blocks of rows."""
    for (index, _), group in groupby(chunks, key=lambda chunk: (chunk.entry, chunk.shard)):
        # No variable holds a tensor here, so that each is freed before the next is made.
        yield from map(bind(_plain, dtypes[index]), _of_shard(entries[index], list(group), reader))


def _of_shard(entry: Entry, chunks: Sequence[Chunk], reader: CheckpointReader) -> Iterator[Tensor]:
    """The chunks of a shard, in blocks; does not hold the last one while it is used."""
    shard, count = chunks[0].shard, chunks[0].num_shards
    if gate_and_up_apart(entry, chunks) or (len(chunks) == 1 and isinstance(entry.rule.op, Identity)):
        for tensor in entry.hf:
            places, zeros = entry.blocks(tensor, shard, count)
            if zeros or len(places) > 1:
                yield from entry.parts(reader.read, shard, count)
            else:
                yield from read_blocks(reader, tensor.name, places[0])
        return
    whole = entry.to_megatron(reader.read, shard, count)
    for chunk in chunks[:-1]:
        yield whole[chunk.slices]
    last = [whole[chunks[-1].slices]]
    del whole
    yield last.pop()


def _plain(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """Cast and contiguous, without the rest of a larger storage, which torch would save too."""
    tensor = tensor.to(dtype)
    alone = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if alone else tensor.clone(memory_format=torch.contiguous_format)


class _Hashed:
    """A stream that counts and hashes what it passes on to another."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self.digest, self.length = stream, xxhash.xxh3_128(), 0

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data)
        for start in range(0, len(view), WRITE_BYTES):
            part = view[start : start + WRITE_BYTES]
            self.digest.update(part)
            self._stream.write(part)
        self.length += len(view)
        return len(view)

    def flush(self) -> None:
        self._stream.flush()


class _InBlocks:
    """A stream that passes on blocks of a tensor where the tensor's elements are written to it."""

    def __init__(self, stream: _Hashed, nbytes: int, blocks: Iterator[Tensor]) -> None:
        self._stream, self._nbytes, self._blocks = stream, nbytes, blocks
        self.left = nbytes

    def write(self, data: bytes) -> int:
        # Only the elements are as long as a tensor of several blocks.
        if len(data) != self._nbytes:
            return self._stream.write(data)
        while self.left > 0:
            block = next(self._blocks)
            self.left -= self._stream.write(bytes_of(block))
            # Freed before the next is made.
            del block
        return self._nbytes

    def flush(self) -> None:
        self._stream.flush()


def _save_chunk(chunk: Chunk, blocks: Iterator[Tensor], stream: _Hashed) -> None:
    """Write a chunk; takes as many blocks as make it up."""
    first = next(blocks)
    if first.numel() == chunk.numel:
        _save(first.view(chunk.stored_shape), stream)
        return
    # Its memory is never touched, so the system gives it none.
    form = torch.empty(chunk.stored_shape, dtype=first.dtype)
    in_blocks = _InBlocks(stream, form.nbytes, chain([first], blocks))
    del first
    _save(form, in_blocks)
    assert in_blocks.left == 0, f"{chunk.key}: {in_blocks.left} bytes are missing"


def _save(tensor: Tensor, stream: Any) -> None:
    """Save a tensor without CRC-32; that setting is the process's."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        torch.save(tensor, stream)
    except RuntimeError as error:
        # torch wraps what the stream raises: the disk is full, or the source is broken.
        if isinstance(error.__context__, OSError | ValueError):
            raise error.__context__ from None
        raise
    finally:
        set_crc32_options(before)
