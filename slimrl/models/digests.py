"""Checksums of written tensors and files, and files read back against them."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

READ_BYTES = 1024**2
"""Read at a time, so that it is hashed while it lies in the processor's cache."""

FILE_THREADS = 8
"""Files that are hashed at a time; hashing and reading let other threads run."""


@dataclass(frozen=True, kw_only=True)
class FileDigest:
    """A file as it was written."""

    bytes: int
    xxh3_128: str


@dataclass(frozen=True, kw_only=True)
class Span:
    """Bytes of a file as they were written."""

    name: str
    """What lies there."""
    start: int
    length: int
    digest: str
    """xxh3-128 of them."""


def tensor_digest(tensor: Tensor) -> str:
    """xxh3-128 of a CPU tensor's elements, in their order."""
    raw: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return xxhash.xxh3_128_hexdigest(raw)


def file_digest(file: Path) -> FileDigest:
    """Read a file whole; raises OSError where that fails."""
    buffer, digest, size = memoryview(bytearray(READ_BYTES)), xxhash.xxh3_128(), 0
    with file.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    return FileDigest(bytes=size, xxh3_128=digest.hexdigest())


def file_digests(root: Path, names: Iterable[str]) -> dict[str, FileDigest]:
    """Of files by their names relative to `root`, several at a time."""
    names = list(names)
    with ThreadPoolExecutor(FILE_THREADS) as pool:
        return dict(zip(names, pool.map(lambda name: file_digest(root / name), names), strict=True))


def check_spans(descriptor: int, file: Path, spans: Iterable[Span], advance: Callable[[int], None]) -> None:
    """Read spans of a file and compare them with what was written.

    Args:
        descriptor: of the file, open for reading.
        file: named in the error.
        advance: told the bytes of each span that is compared.

    Raises:
        OSError: a span is not the same.
    """
    buffer = memoryview(bytearray(READ_BYTES))
    for span in spans:
        digest, position, end = xxhash.xxh3_128(), span.start, span.start + span.length
        while count := os.preadv(descriptor, [buffer[: min(end - position, READ_BYTES)]], position):
            digest.update(buffer[:count])
            position += count
        if digest.hexdigest() != span.digest:
            raise OSError(f"{file}: {span.name} reads back differently than it was written")
        advance(span.length)
