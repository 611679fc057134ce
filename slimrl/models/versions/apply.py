"""A version into a checkpoint folder: a whole one copied, a delta applied in place; every changed tensor is checked.

What breaks off in between leaves a folder that is no version; local_copy.py sees to it that nobody loads it.
"""

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
import xxhash

from slimrl.models.safetensors_file import Place, element_bytes, read_header, write_at
from slimrl.models.versions.blocks import block_ranges, file_hash, num_workers, read_at
from slimrl.models.versions.codec import BLOCK_BYTES, BlockCodec
from slimrl.models.versions.manifest import Block, Manifest, StoredTensor

T = TypeVar("T")


def copy_whole(source: Path, manifest: Manifest, checkpoint: Path) -> None:
    """Copy a whole version's files into a new folder and compare every tensor's hash.

    Raises:
        ValueError: a tensor came out other than it was written.
        OSError: the disk is full, or reading or writing failed; names version and file.
    """
    checkpoint.mkdir()

    def copy(name: str) -> None:
        with _named(manifest, checkpoint / name):
            shutil.copyfile(source / name, checkpoint / name)
        if name.endswith(".safetensors"):
            _check_tensors(checkpoint / name, manifest)

    _in_parallel(copy, manifest.files)


def _check_tensors(file: Path, manifest: Manifest) -> None:
    with _opened(file, os.O_RDONLY) as descriptor:
        for name, place in read_header(file).items():
            _check_hash(manifest, name, file, file_hash(descriptor, file, place.start, place.nbytes))


def apply_delta(source: Path, manifest: Manifest, checkpoint: Path) -> None:
    """Bring a checkpoint from the delta's base to the delta's version, in place.

    Args:
        source: the delta's folder.
        checkpoint: safetensors files of the base.

    Raises:
        ValueError: a file is damaged, or a tensor is not what it should be afterwards, as on a wrong base.
        OSError: the disk is full, or reading or writing failed; names version, file and tensor.
    """
    assert manifest.encoding is not None, "a whole version is copied"
    changed = [tensor for tensor in manifest.tensors.values() if tensor.blocks]
    files = sorted({block.file for tensor in changed for block in tensor.blocks})
    with ExitStack() as stack:
        frames = {name: (stack.enter_context(_opened(source / name, os.O_RDONLY)), source / name) for name in files}
        places = _writable_tensors(checkpoint, stack)
        encoding, scratch = manifest.encoding, threading.local()

        def apply(tensor: StoredTensor) -> None:
            if not hasattr(scratch, "codec"):
                scratch.codec, scratch.buffer = BlockCodec(encoding), np.empty(BLOCK_BYTES, dtype=np.uint8)
            name = tensor.spec.name
            if name not in places or places[name][2].spec != tensor.spec:
                raise ValueError(f"{manifest.ref}: {checkpoint} has no {name} of this shape and type; it is no base")
            descriptor, file, place = places[name]
            with _named(manifest, file, name):
                found = _apply_tensor(tensor, frames, descriptor, file, place, scratch.codec, scratch.buffer)
            _check_hash(manifest, name, file, found)

        _in_parallel(apply, changed)


def _writable_tensors(checkpoint: Path, stack: ExitStack) -> dict[str, tuple[int, Path, Place]]:
    places: dict[str, tuple[int, Path, Place]] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        descriptor = stack.enter_context(_opened(file, os.O_RDWR))
        places |= {name: (descriptor, file, place) for name, place in read_header(file).items()}
    return places


def _apply_tensor(
    tensor: StoredTensor,
    frames: dict[str, tuple[int, Path]],
    descriptor: int,
    file: Path,
    place: Place,
    codec: BlockCodec,
    buffer: np.ndarray,
) -> str:
    """Change one tensor; the hash of what it is then."""
    state = xxhash.xxh3_64()
    for start, stop, block in _segments(tensor):
        data = buffer[: stop - start]
        read_at(descriptor, file, data, place.start + start)
        if block is not None:
            source, source_file = frames[block.file]
            frame = np.empty(block.nbytes, dtype=np.uint8)
            read_at(source, source_file, frame, block.offset)
            try:
                codec.apply(frame.data, data, element_bytes(tensor.spec.dtype))
            except ValueError as error:
                raise ValueError(f"{source_file}: {error}") from error
            write_at(descriptor, data.data, place.start + start)
        state.update(data.data)
    return state.hexdigest()


def _segments(tensor: StoredTensor) -> Iterator[tuple[int, int, Block | None]]:
    """The whole tensor in pieces of at most BLOCK_BYTES: (start, stop, what changes there)."""
    end = 0
    for block in tensor.blocks:
        yield from ((start, stop, None) for start, stop in block_ranges(block.start - end, end))
        if not (end <= block.start < block.stop <= tensor.nbytes and block.stop - block.start <= BLOCK_BYTES):
            raise ValueError(f"a block of the bytes {block.start} to {block.stop}, behind byte {end}")
        yield block.start, block.stop, block
        end = block.stop
    yield from ((start, stop, None) for start, stop in block_ranges(tensor.nbytes - end, end))


def _check_hash(manifest: Manifest, name: str, file: Path, found: str) -> None:
    stored = manifest.tensors.get(name)
    if stored is None:
        raise ValueError(f"{manifest.ref}: {file}: {name} is not of this version")
    if found != stored.xxh3:
        raise ValueError(f"{manifest.ref}: {file}: {name} has the checksum {found}, {stored.xxh3} is due")


def _in_parallel(call: Callable[[T], None], items: Iterable[T]) -> None:
    """Raises the first error, after the calls that had begun."""
    with ThreadPoolExecutor(num_workers()) as pool:
        futures = [pool.submit(call, item) for item in items]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


@contextmanager
def _opened(file: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(file, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _named(manifest: Manifest, file: Path, tensor: str = "") -> Iterator[None]:
    """Errors inside say of which version, file and tensor they are."""
    place = f"{manifest.ref}: {file}" + (f": {tensor}" if tensor else "")
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    except OSError as error:
        reason = "no space left on the disk" if error.errno == errno.ENOSPC else error.strerror
        raise OSError(error.errno, f"{place}: {reason}") from error
