"""Files of a torch_dist checkpoint: blocks of tensors one behind the other, each as torch saves a tensor.

1. The pieces that the schema lists are cut into files of bounded size; the pieces of one shard stay together.
2. A file is written piece by piece, each made when it is due from slices of Hugging Face tensors, and hashed.
3. Its record says what it holds. Files can so be written by several processes, and at several times.

Blocks have no checksum of torch's own (the CRC-32 of zip files), which takes longer than all else; readers of torch and
of megatron-core do not ask for it.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash
from torch import Tensor
from torch.serialization import get_crc32_options, set_crc32_options

from slimrl.models.checkpoint_reader import CheckpointReader
from slimrl.models.digests import Span, check_spans
from slimrl.models.read_ahead import read_ahead
from slimrl.models.shard_pieces import Piece, ShardSchema, stored_apart
from slimrl.models.weight_map import Entry
from slimrl.models.whole_file import WRITE_BYTES, whole_file

FILE_BYTES = 10**9
"""Tensor bytes per file, where nothing else is asked for."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A piece in a file."""

    key: str
    offset: tuple[int, ...]
    start: int
    """First byte in the file."""
    length: int
    """Bytes in the file, torch's framing included."""
    digest: str
    """xxh3-128 of those bytes."""

    @property
    def span(self) -> Span:
        """Where it lies, to be checked."""
        return Span(name=self.key, start=self.start, length=self.length, digest=self.digest)


def plan_files(
    schema: ShardSchema, dtypes: Sequence[torch.dtype], file_bytes: int = FILE_BYTES
) -> dict[str, list[Piece]]:
    """File name -> what is in it, in the order of the weight map.

    Args:
        dtypes: of the stored tensors, by entry of the weight map.
        file_bytes: tensor bytes per file at most; a larger shard gets a file of its own.
    """
    files: list[list[Piece]] = []
    filled = file_bytes
    for _, group in groupby(schema.pieces, key=lambda piece: (piece.entry, piece.shard)):
        pieces = list(group)
        size = sum(piece_bytes(piece, dtypes) for piece in pieces)
        if filled + size > file_bytes:
            files.append([])
            filled = 0
        files[-1] += pieces
        filled += size
    return {f"__0_{number}.distcp": pieces for number, pieces in enumerate(files)}


def piece_bytes(piece: Piece, dtypes: Sequence[torch.dtype]) -> int:
    return piece.numel * dtypes[piece.entry].itemsize


def write_file(
    file: Path,
    pieces: Sequence[Piece],
    entries: Sequence[Entry],
    dtypes: Sequence[torch.dtype],
    reader: CheckpointReader,
    written: Callable[[int, Block], None],
) -> list[Block]:
    """Write one file, which has its name only when it is whole. Each piece is made while the one before is written.

    Holds at most 3 times one shard, in the source's dtype or the stored one, whichever is larger: what it is laid out
    from and itself, or itself and the piece to be stored, and the piece that is being written.

    Args:
        reader: used by another thread meanwhile.
        written: told of each block that is in the file, with the file's descriptor, open for reading and writing.

    Raises:
        OSError: the disk is full, or writing failed; it names the file, and nothing is left behind.
        ValueError: the source is broken.
    """
    blocks = []
    with whole_file(file) as stream:
        for piece, tensor in read_ahead(_tensors(pieces, entries, dtypes, reader)):
            hashed = _Hashed(stream)
            _save(tensor, hashed)
            # Gone before the next is made.
            del tensor
            stream.flush()
            start = stream.tell() - hashed.length
            blocks.append(
                Block(key=piece.key, offset=piece.offset, start=start, length=hashed.length, digest=hashed.digest())
            )
            written(stream.fileno(), blocks[-1])
    return blocks


def check_file(file: Path, blocks: Iterable[Block], advance: Callable[[int], None]) -> None:
    """Read a file back and compare what is in it with what was written.

    Args:
        advance: told the bytes of each block that is compared.

    Raises:
        OSError: it is not the same.
    """
    with file.open("rb", buffering=0) as stream:
        check_spans(stream.fileno(), file, (block.span for block in blocks), advance)


def write_record(file: Path, blocks: Sequence[Block]) -> None:
    """Say what is in a file, for `read_record`."""
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(json.dumps([asdict(block) for block in blocks]))
    partial.replace(file)


def read_record(file: Path) -> list[Block]:
    return [Block(**{**block, "offset": tuple(block["offset"])}) for block in json.loads(file.read_text())]


def _tensors(
    pieces: Sequence[Piece], entries: Sequence[Entry], dtypes: Sequence[torch.dtype], reader: CheckpointReader
) -> Iterator[tuple[Piece, Tensor]]:
    for (entry, _), group in groupby(pieces, key=lambda piece: (piece.entry, piece.shard)):
        members, dtype = list(group), dtypes[entry]
        stored = _of_shard(entries[entry], members, reader)
        # Nothing here refers to a tensor, so that each is gone before the next is made.
        yield from ((piece, _plain(next(stored), dtype).view(piece.stored_shape)) for piece in members)


def _of_shard(entry: Entry, pieces: Sequence[Piece], reader: CheckpointReader) -> Iterator[Tensor]:
    """The pieces of a shard; the last one is not held here while it is used."""
    shard, count = pieces[0].shard, pieces[0].num_shards
    if stored_apart(entry, pieces):
        yield from entry.parts(reader.read, shard, count)
        return
    whole = entry.to_megatron(reader.read, shard, count)
    for piece in pieces[:-1]:
        yield whole[piece.slices]
    last = [whole[pieces[-1].slices]]
    del whole
    yield last.pop()


def _plain(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast, and in memory of its own, all of which torch would save."""
    tensor = tensor.to(dtype)
    alone = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if alone else tensor.clone(memory_format=torch.contiguous_format)


class _Hashed:
    """What torch writes through it goes into the stream, and is counted and hashed."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._digest, self.length = stream, xxhash.xxh3_128(), 0

    def write(self, data: bytes) -> int:
        view = memoryview(data)
        for start in range(0, len(view), WRITE_BYTES):
            part = view[start : start + WRITE_BYTES]
            self._digest.update(part)
            self._stream.write(part)
        self.length += len(view)
        return len(view)

    def flush(self) -> None:
        self._stream.flush()

    def digest(self) -> str:
        return self._digest.hexdigest()


def _save(tensor: Tensor, stream: Any) -> None:
    try:
        with _no_crc32():
            torch.save(tensor, stream)
    except RuntimeError as error:
        # A fault of the disk reaches torch as an exception of the stream, which it wraps.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


@contextmanager
def _no_crc32() -> Iterator[None]:
    """What torch saves meanwhile has no CRC-32; it is torch's setting for the whole process."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)
