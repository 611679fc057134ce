"""Files of a torch_dist checkpoint: chunks of tensors one after the other, each as torch.save writes a tensor.

1. The schema's chunks are distributed over files of bounded size; the chunks of a shard share a file.
2. A file is written chunk by chunk. Each is made from slices of Hugging Face tensors while the one before is written.

Chunks lack torch's own checksum (the CRC-32 of zip files), which takes longer than all the rest; torch and
megatron-core do not check it.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash
from torch import Tensor
from torch.serialization import get_crc32_options, set_crc32_options

from slimrl.checkpoints.checkpoint_reader import CheckpointReader
from slimrl.checkpoints.digests import Span
from slimrl.checkpoints.file_groups import group_by_bytes
from slimrl.checkpoints.read_ahead import read_ahead
from slimrl.checkpoints.torch_dist.chunks import Chunk, ShardSchema, gate_and_up_apart
from slimrl.data.atomic import WRITE_BYTES, atomic_file
from slimrl.models.weight_map import Entry

FILE_BYTES = 10**9
"""Default of tensor bytes per file."""


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
    with atomic_file(file) as stream:
        for chunk, tensor in read_ahead(_tensors(chunks, entries, dtypes, reader)):
            hashed = _Hashed(stream)
            _save(tensor, hashed)
            # Freed before the next is made.
            del tensor
            stream.flush()
            start = stream.tell() - hashed.length
            span = Span(name=chunk.key, start=start, length=hashed.length, digest=hashed.digest.hexdigest())
            written(stream.fileno(), span)


def _tensors(
    chunks: Sequence[Chunk], entries: Sequence[Entry], dtypes: Sequence[torch.dtype], reader: CheckpointReader
) -> Iterator[tuple[Chunk, Tensor]]:
    for (entry, _), group in groupby(chunks, key=lambda chunk: (chunk.entry, chunk.shard)):
        members, dtype = list(group), dtypes[entry]
        stored = _of_shard(entries[entry], members, reader)
        # No variable holds a tensor here, so that each is freed before the next is made.
        yield from ((chunk, _plain(next(stored), dtype).view(chunk.stored_shape)) for chunk in members)


def _of_shard(entry: Entry, chunks: Sequence[Chunk], reader: CheckpointReader) -> Iterator[Tensor]:
    """The chunks of a shard; does not hold the last one while it is used."""
    shard, count = chunks[0].shard, chunks[0].num_shards
    if gate_and_up_apart(entry, chunks):
        yield from entry.parts(reader.read, shard, count)
        return
    whole = entry.to_megatron(reader.read, shard, count)
    for chunk in chunks[:-1]:
        yield whole[chunk.slices]
    last = [whole[chunks[-1].slices]]
    del whole
    yield last.pop()


def _plain(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast and contiguous, without the rest of a larger storage, which torch would save too."""
    tensor = tensor.to(dtype)
    alone = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if alone else tensor.clone(memory_format=torch.contiguous_format)


class _Hashed:
    """A stream that counts and hashes what it passes on to another."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self.digest, self.length = stream, xxhash.xxh3_128(), 0

    def write(self, data: bytes) -> int:
        view = memoryview(data)
        for start in range(0, len(view), WRITE_BYTES):
            part = view[start : start + WRITE_BYTES]
            self.digest.update(part)
            self._stream.write(part)
        self.length += len(view)
        return len(view)

    def flush(self) -> None:
        self._stream.flush()


def _save(tensor: Tensor, stream: Any) -> None:
    """Saves without CRC-32; that setting is the process's."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        torch.save(tensor, stream)
    except RuntimeError as error:
        # torch wraps an OSError of the stream.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
    finally:
        set_crc32_options(before)
