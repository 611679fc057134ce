"""Checksums of written tensors and files, and files read back against them."""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import xxhash

READ_BYTES = 1024**2
"""Number of bytes read at a time, so that they are hashed while in the processor's cache."""

FILE_THREADS = 8
"""Number of files that are hashed at a time; hashing and reading release the GIL."""

Seen = Callable[[int, int], None]
"""Called after each file with the numbers of those that have been read, and of all"""


@dataclass(frozen=True, kw_only=True)
class FileDigest:
    """Size and checksum of a file as it was written."""

    bytes: int
    xxh3_128: str


@dataclass(frozen=True, kw_only=True)
class Span:
    """Range and checksum of bytes of a file as they were written."""

    name: str
    """Name of the tensor in the range."""
    start: int
    length: int
    digest: str
    """Checksum of the bytes, xxh3-128."""


def file_digest(file: Path) -> FileDigest:
    """Size and checksum of a file. Raises OSError if the file cannot be read."""
    with file.open("rb", buffering=0) as stream:
        digest = hashlib.file_digest(stream, xxhash.xxh3_128)
        return FileDigest(bytes=stream.tell(), xxh3_128=digest.hexdigest())


def not_shown(done: int, total: int) -> None:
    """A `seen` that shows nothing."""


def file_digests(root: Path, names: Iterable[str], seen: Seen = not_shown) -> dict[str, FileDigest]:
    """Sizes and checksums of files by their names relative to `root`; several files are read at a time."""
    names, digests = list(names), {}
    with ThreadPoolExecutor(FILE_THREADS) as pool:
        read = pool.map(lambda name: file_digest(root / name), names)
        for done, (name, digest) in enumerate(zip(names, read, strict=True), 1):
            digests[name] = digest
            seen(done, len(names))
    return digests


def differences(root: Path, files: Mapping[str, FileDigest], seen: Seen = not_shown, *, contents: bool) -> list[str]:
    """What differs between files and their digests, as lines of text.

    Args:
        files: digests by the files' names relative to `root`.
        contents: read every file for its checksum, if the sizes are right; otherwise compare these alone.
    """
    if (found := list(_wrong_sizes(root, files))) or not contents:
        return found
    try:
        read = file_digests(root, files, seen)
    except OSError as error:
        return [f"{error.filename}: {error.strerror}"]
    return [f"{name}: its checksum differs" for name in files if read[name] != files[name]]


def _wrong_sizes(root: Path, files: Mapping[str, FileDigest]) -> Iterator[str]:
    for name, written in files.items():
        path = root / name
        if not path.is_file():
            yield f"{name}: missing"
        elif (size := path.stat().st_size) != written.bytes:
            yield f"{name}: {size} bytes instead of {written.bytes}"


def check_spans(descriptor: int, file: Path, spans: Iterable[Span], advance: Callable[[int], None]) -> None:
    """Read spans of a file and compare them with their checksums.

    Args:
        descriptor: of the file, open for reading.
        file: named in the error.
        advance: called with the bytes of each span.

    Raises:
        OSError: a span differs.
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
