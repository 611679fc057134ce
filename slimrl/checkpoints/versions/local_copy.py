"""An engine's own copy of the weights, from which it reloads each version.

The engine has one folder on each of its nodes, for all its processes there. Engines do not share one: an engine that
hangs while it loads would keep the others from the next version.

- `checkpoint/`: a Hugging Face checkpoint.
- `state.json`: its version, and whether it is clean. It is marked as not clean before the first byte changes, and as
  clean with the new version after the last tensor was checked.
- `lock`: held exclusively while the copy changes, and shared while processes load it. The kernel releases it when a
  process ends.

A copy starts again from a whole version if it is not clean, if its version is not on the chain to the next one, or if
the machine was rebooted since (bytes that were not yet on the disk may be lost). A whole version is copied, a delta is
applied in place; the checksums of copied and changed tensors are compared.
"""

import fcntl
import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash

from slimrl.base.atomic import disk_reason, write_whole
from slimrl.checkpoints.safetensors_file import TensorLocation, element_bytes, read_header, write_at
from slimrl.checkpoints.tensor_bytes import fill
from slimrl.checkpoints.versions.codec import BLOCK_BYTES, BlockCodec, block_ranges, num_workers
from slimrl.checkpoints.versions.directory import VersionDirectory
from slimrl.checkpoints.versions.manifest import Frame, Manifest, StoredTensor, VersionRef, read_manifest

POLL_S = 0.02
"""Seconds between two attempts to take a lock that another process holds."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class LocalCopy:
    """The copy in the folder `path`, which may not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._checkpoint = path / "checkpoint"
        self._state_file = path / "state.json"

    @contextmanager
    def at(self, target: Path, timeout_s: float) -> Iterator[Path]:
        """Bring the copy to the version in the folder `target`; it does not change during the block.

        The first process does the work; the others wait for it.

        Yields:
            The checkpoint folder.

        Raises:
            ValueError: the version, or one that it builds on, is missing, damaged or another writing.
            OSError: the disk is full, or reading or writing failed.
            TimeoutError: other processes held the lock for `timeout_s`.
        """
        manifest = read_manifest(target)
        try:
            self._path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(error.errno, f"resync.local_dir: {error.strerror}", str(self._path)) from error
        deadline = time.monotonic() + timeout_s
        with (self._path / "lock").open("ab") as lock:
            while not (_try_lock(lock, fcntl.LOCK_SH) and self.version() == manifest.ref):
                if _try_lock(lock, fcntl.LOCK_EX):
                    if self.version() != manifest.ref:
                        self._bring_to(manifest, VersionDirectory(target.parent))
                elif time.monotonic() > deadline:
                    have = self.version()
                    raise TimeoutError(
                        f"{self._path}: no lock for {manifest.ref} within {timeout_s:g} s; "
                        f"other processes load {have or 'it'}"
                    )
                else:
                    time.sleep(POLL_S)
            yield self._checkpoint

    def version(self) -> VersionRef | None:
        """The version that the copy holds; None if there is none, or it is not reliable."""
        try:
            state = json.loads(self._state_file.read_text())
            if state["clean"] and state["boot"] == _boot_id() and self._checkpoint.is_dir():
                return VersionRef(version=state["version"], id=state["id"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            # Never written, or truncated.
            return None
        return None

    def _bring_to(self, target: Manifest, directory: VersionDirectory) -> None:
        chain = directory.chain(target, self.version())
        self._set_state(target.ref, clean=False)
        try:
            for manifest in chain:
                source = directory.folder(manifest.ref.version)
                if manifest.base is None:
                    shutil.rmtree(self._checkpoint, ignore_errors=True)
                    copy_whole(source, manifest, self._checkpoint)
                else:
                    apply_delta(source, manifest, self._checkpoint)
            self._set_state(target.ref, clean=True)
        except OSError:
            # The copy is of no use any more, and the next attempt may need its room on a full disk.
            shutil.rmtree(self._checkpoint, ignore_errors=True)
            raise

    def _set_state(self, ref: VersionRef, *, clean: bool) -> None:
        state = {"version": ref.version, "id": ref.id, "clean": clean, "boot": _boot_id()}
        write_whole(self._state_file, json.dumps(state))


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


def _try_lock(lock: BinaryIO, kind: int) -> bool:
    """Take the lock, or change its kind, without waiting; after a failure no lock is held."""
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        fcntl.flock(lock, fcntl.LOCK_UN)
        return False
    return True


def _boot_id() -> str:
    return _BOOT_ID.read_text().strip()
