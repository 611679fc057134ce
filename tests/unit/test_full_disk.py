"""Disks and shared memory that fill up in the middle of a version: a limit on files, and disks of a few pages."""

import ctypes
import errno
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from version_cases import (
    SPECS,
    CopyEngine,
    assert_equal,
    delta_transport,
    disk_transport,
    random_weights,
    send,
    with_changes,
)

from slimrl.checkpoints.safetensors_file import spec_bytes
from slimrl.data.engine import EngineError
from slimrl.resync.ipc import shared_buffer
from slimrl.resync.ipc.shared_buffer import FileBuffer

pytestmark = pytest.mark.usefixtures("small_blocks")

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_REMOUNT, _DETACH = 32, 2
"""MS_REMOUNT of mount(2), MNT_DETACH of umount2(2)"""
_LIBC = ctypes.CDLL(None, use_errno=True)


def mount_tmpfs(folder: Path, pages: int, flags: int = 0) -> None:
    size = f"size={pages * PAGE_BYTES}".encode()
    if _LIBC.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", flags, size):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[tuple[Path, Callable[[int], None]]]:
    """An empty file system of its own, and what gives it another number of pages."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        mount_tmpfs(folder, 1)
    except OSError as error:
        pytest.skip(f"mounting a tmpfs is refused: {error}")
    try:
        yield folder, lambda pages: mount_tmpfs(folder, pages, _REMOUNT)
    finally:
        _LIBC.umount2(os.fsencode(folder), _DETACH)


def error_of[E: Exception](call: Callable[[], None], kind: type[E]) -> E | None:
    """What the call raised, where that is of the kind."""
    try:
        call()
    except kind as error:
        return error
    return None


@contextmanager
def no_file_above(nbytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("kind", ["disk", "delta"])
def test_a_sender_s_full_disk_is_named_and_gets_its_room_back(tmp_path, model_dir, kind):
    engine, weights = CopyEngine(), random_weights(0)
    if kind == "disk":
        transport, folder = disk_transport(tmp_path, model_dir), tmp_path / "versions"
    else:
        transport, folder = delta_transport(tmp_path, model_dir), tmp_path / "local"
    with no_file_above(2000), pytest.raises(OSError, match="File too large") as caught:
        send(transport, [engine], 1, weights)
    assert caught.value.filename == str(folder)
    assert list(folder.iterdir()) == list((tmp_path / "versions").iterdir()) == []
    send(transport, [engine], 1, weights)
    assert_equal(engine.weights, weights)


def test_an_engine_s_full_disk_is_named_and_the_next_version_works(tmp_path, model_dir):
    transport = delta_transport(tmp_path, model_dir)
    engine, weights = CopyEngine(), random_weights(0)
    send(transport, [], 1, weights)
    cause = r"version 1 .*local/engine_0/checkpoint/model-.*\.safetensors: File too large"
    with no_file_above(2000), pytest.raises(EngineError, match=cause):
        engine.load_version(str(tmp_path / "versions" / "v000001"), str(tmp_path / "local" / "engine_0"))
    assert engine.weights == {}
    weights = with_changes(weights, "big")
    send(transport, [engine], 2, weights)
    assert_equal(engine.weights, weights)


@pytest.mark.parametrize("kind", ["disk", "delta"])
def test_wherever_a_version_finds_the_disk_full_the_one_before_stays_and_the_next_one_works(
    tmp_path, model_dir, disk, kind
):
    """With every number of pages from those of the first version to those of both."""
    folder, resize = disk
    (tmp_path / "versions").symlink_to(folder)
    transport = (disk_transport if kind == "disk" else delta_transport)(tmp_path, model_dir)
    engine, weights = CopyEngine(), random_weights(0)
    resize(1000)
    send(transport, [engine], 1, weights)
    used, refused = pages_used(folder), 0
    for pages in range(used, 1000):
        resize(pages)
        new = with_changes(weights, "big", "embed")
        error = error_of(partial(send, transport, [engine], 2, new), OSError)
        if error is None:
            break
        refused += 1
        assert error.errno == errno.ENOSPC
        assert "no space left on the disk" in str(error)
        assert error.filename is not None
        assert Path(error.filename).is_relative_to(tmp_path)
        assert [path.name for path in folder.iterdir()] == ["v000001"]
        assert pages_used(folder) == used
        assert_equal(engine.weights, weights)
    assert refused == pages - used > 3
    assert_equal(engine.weights, new)


def test_wherever_an_engine_s_copy_finds_the_disk_full_nothing_is_loaded_and_the_version_works_where_there_is_room(
    tmp_path, model_dir, disk
):
    folder, resize = disk
    transport = delta_transport(tmp_path, model_dir)
    engine, weights = CopyEngine(), random_weights(0)
    send(transport, [], 1, weights)
    version = str(tmp_path / "versions" / "v000001")
    needed = sum(map(spec_bytes, SPECS)) // PAGE_BYTES
    for pages in range(1, 1000):
        resize(pages)
        error = error_of(partial(engine.load_version, version, str(folder / "engine_0")), EngineError)
        if error is None:
            break
        assert f"{folder}/engine_0" in str(error)
        assert "no space left on" in str(error).lower()
        assert engine.weights == {}
        # A second attempt fails at the same place, which is the one that needs room.
        assert pages_used(folder) <= 1
        assert not (folder / "engine_0" / "checkpoint").exists()
    assert needed < pages < 1000
    assert_equal(engine.weights, weights)


def test_full_shared_memory_is_an_error_that_leaves_nothing_behind(disk, monkeypatch):
    folder, resize = disk
    monkeypatch.setattr(shared_buffer, "SHARED_MEMORY_DIR", folder)
    resize(4)
    first = FileBuffer(3 * PAGE_BYTES, "first")
    with pytest.raises(OSError, match="No space left") as caught:
        FileBuffer(2 * PAGE_BYTES, "second")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(folder))
    assert [path.name for path in folder.iterdir()] == [first.segment()]
    first.close()
    del first  # Its mapping keeps the memory.
    second = FileBuffer(2 * PAGE_BYTES, "second")
    second.tensor.fill_(1)
    second.close()
    assert list(folder.iterdir()) == []


def pages_used(folder: Path) -> int:
    status = os.statvfs(folder)
    return (status.f_blocks - status.f_bfree) * status.f_frsize // PAGE_BYTES
