"""Brings a checkpoint folder to a version: copies a whole one, applies a delta in place, and checks changed tensors.

An interruption leaves a folder that is no version; local_copy.py makes sure that nobody loads it.
"""

import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import xxhash

from slimrl.base.atomic import disk_reason
from slimrl.checkpoints.safetensors_file import TensorLocation, element_bytes, read_header, write_at
from slimrl.checkpoints.tensor_bytes import fill
from slimrl.checkpoints.versions.codec import BLOCK_BYTES, BlockCodec, block_ranges, num_workers
from slimrl.checkpoints.versions.manifest import Frame, Manifest, StoredTensor


def copy_whole(source: Path, manifest: Manifest, checkpoint: Path) -> None:
    """Copy a whole version's files into a new folder and compare every tensor's hash.

    Raises:
        ValueError: a tensor differs from what was written.
        OSError: the disk is full, or reading or writing failed; names version and file.
    """
    checkpoint.mkdir()

    def copy(name: str) -> None:
        with _named(manifest, checkpoint / name):
            shutil.copyfile(source / name, checkpoint / name)
        if name.endswith(".safetensors"):
            with (checkpoint / name).open("rb") as stream:
                for tensor, place in read_header(checkpoint / name).items():
                    found = file_hash(stream.fileno(), checkpoint / name, place.start, place.nbytes)
                    _check_hash(manifest, tensor, checkpoint / name, found)

    _in_parallel(copy, manifest.files)


def apply_delta(source: Path, manifest: Manifest, checkpoint: Path) -> None:
    """Bring a checkpoint from the delta's base to the delta's version, in place.

    Args:
        source: the delta's folder.
        checkpoint: safetensors files of the base.

    Raises:
        ValueError: a file is damaged, or a tensor has the wrong hash afterwards, as on a wrong base.
        OSError: the disk is full, or reading or writing failed; names version, file and tensor.
    """
    assert manifest.encoding is not None, "a whole version is copied"
    changed = [tensor for tensor in manifest.tensors.values() if tensor.frames]
    names = sorted({frame.file for tensor in changed for frame in tensor.frames})
    with ExitStack() as stack:
        files = {name: (stack.enter_context((source / name).open("rb")).fileno(), source / name) for name in names}
        places = _writable_tensors(checkpoint, stack)
        codec = BlockCodec(manifest.encoding)

        def apply(tensor: StoredTensor) -> None:
            name = tensor.spec.name
            if name not in places or places[name][2].spec != tensor.spec:
                raise ValueError(f"{manifest.ref}: {checkpoint} has no {name} of this shape and type; it is no base")
            descriptor, file, place = places[name]
            with _named(manifest, file, name):
                found = _apply_tensor(tensor, files, descriptor, file, place, codec)
            _check_hash(manifest, name, file, found)

        _in_parallel(apply, changed)


def _writable_tensors(checkpoint: Path, stack: ExitStack) -> dict[str, tuple[int, Path, TensorLocation]]:
    places: dict[str, tuple[int, Path, TensorLocation]] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        descriptor = stack.enter_context(file.open("r+b")).fileno()
        places |= {name: (descriptor, file, place) for name, place in read_header(file).items()}
    return places


def _apply_tensor(
    tensor: StoredTensor,
    files: dict[str, tuple[int, Path]],
    descriptor: int,
    file: Path,
    place: TensorLocation,
    codec: BlockCodec,
) -> str:
    """Change one tensor; returns its hash afterwards."""
    state = xxhash.xxh3_64()
    for start, stop, frame in _segments(tensor):
        data = codec.buffer[: stop - start]
        fill(descriptor, file, data.data, place.start + start)
        if frame is not None:
            source, source_file = files[frame.file]
            encoded = np.empty(frame.nbytes, dtype=np.uint8)
            fill(source, source_file, encoded.data, frame.offset)
            try:
                codec.apply(encoded.data, data, element_bytes(tensor.spec.dtype))
            except ValueError as error:
                raise ValueError(f"{source_file}: {error}") from error
            write_at(descriptor, data.data, place.start + start)
        state.update(data.data)
    return state.hexdigest()


def _segments(tensor: StoredTensor) -> Iterator[tuple[int, int, Frame | None]]:
    """The whole tensor in blocks of at most BLOCK_BYTES: (start, stop, frame of a changed block or None)."""
    end = 0
    for frame in tensor.frames:
        yield from ((start, stop, None) for start, stop in block_ranges(frame.start - end, end))
        if not (end <= frame.start < frame.stop <= tensor.nbytes and frame.stop - frame.start <= BLOCK_BYTES):
            raise ValueError(f"a block of the bytes {frame.start} to {frame.stop} follows byte {end}")
        yield frame.start, frame.stop, frame
        end = frame.stop
    yield from ((start, stop, None) for start, stop in block_ranges(tensor.nbytes - end, end))


def file_hash(descriptor: int, file: Path, start: int, nbytes: int) -> str:
    """XXH3-64, 16 hexadecimal digits, of some of a file's bytes."""
    state = xxhash.xxh3_64()
    buffer = np.empty(min(nbytes, BLOCK_BYTES), dtype=np.uint8)
    for first, stop in block_ranges(nbytes, start):
        block = buffer[: stop - first]
        fill(descriptor, file, block.data, first)
        state.update(block.data)
    return state.hexdigest()


def _check_hash(manifest: Manifest, name: str, file: Path, found: str) -> None:
    stored = manifest.tensors.get(name)
    if stored is None:
        raise ValueError(f"{manifest.ref}: {file}: {name} is not in this version")
    if found != stored.xxh3:
        raise ValueError(f"{manifest.ref}: {file}: {name} has the checksum {found}, expected {stored.xxh3}")


def _in_parallel[T](call: Callable[[T], None], items: Iterable[T]) -> None:
    """Raises the first error when the calls that have begun have ended."""
    with ThreadPoolExecutor(num_workers()) as pool:
        for _ in pool.map(call, items):
            pass


@contextmanager
def _named(manifest: Manifest, file: Path, tensor: str = "") -> Iterator[None]:
    """Errors inside name version, file and tensor."""
    place = f"{manifest.ref}: {file}" + (f": {tensor}" if tensor else "")
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    except OSError as error:
        raise OSError(error.errno, f"{place}: {disk_reason(error)}") from error
