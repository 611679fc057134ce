"""Files in /dev/shm: their names, and what is removed of those that killed runs left behind."""

import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from slimrl.base.meeting_folder import meeting_folder
from slimrl.resync.ipc import shared_buffer, stale_files
from slimrl.resync.ipc.shared_buffer import SHARED_MEMORY_DIR, FileBuffer, open_shared
from slimrl.resync.ipc.stale_files import clean_stale_segments

LOCK_AND_DIE = """
import fcntl, os, signal, sys
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(descriptor, fcntl.LOCK_EX)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def left():
    """The file of a process that was killed."""
    path = SHARED_MEMORY_DIR / f"slimrl-killed_run-1-{secrets.randbits(63)}"
    subprocess.run([sys.executable, "-c", LOCK_AND_DIE, str(path)], timeout=60, check=False)
    assert path.is_file()
    yield path
    path.unlink(missing_ok=True)


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_files_of_killed_processes_are_removed_and_those_of_living_ones_kept(left):
    living = FileBuffer(16, "living/run")
    path = SHARED_MEMORY_DIR / living.segment()
    removed = clean_stale_segments()
    assert left.name in removed
    assert not left.exists()
    assert path.exists()
    living.close()
    living.close()
    assert not path.exists()


def test_a_file_in_use_is_kept_though_nobody_knows_its_maker_s_number(monkeypatch):
    """As that of a process in another container."""
    monkeypatch.setattr(os, "getpid", dead_pid)
    living = FileBuffer(16, "container")
    monkeypatch.undo()
    try:
        assert living.segment() not in clean_stale_segments()
        assert (SHARED_MEMORY_DIR / living.segment()).exists()
    finally:
        living.close()


def test_what_a_killed_run_of_another_user_left_is_theirs_to_remove(monkeypatch, left):
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    assert left.name not in clean_stale_segments()
    assert left.exists()


def test_a_file_that_is_removed_before_it_is_locked_is_made_again(monkeypatch):
    taken = []

    def lock_late(descriptor: int) -> bool:
        if not taken:
            taken.append(Path(f"/proc/self/fd/{descriptor}").resolve())
            taken[0].unlink()
        return lock(descriptor)

    lock = shared_buffer.lock
    monkeypatch.setattr(shared_buffer, "lock", lock_late)
    buffer = FileBuffer(16, "again")
    path = SHARED_MEMORY_DIR / buffer.segment()
    assert path.exists()
    assert path != taken[0]
    buffer.close()


def test_a_name_of_shared_memory_is_not_used_again():
    """An engine keeps the memory mapped that it has met under a name."""
    names = set()
    for _ in range(20):
        buffer = FileBuffer(16, "again")
        names.add(buffer.segment())
        buffer.close()
    assert len(names) == 20


@pytest.mark.parametrize(
    ("namespace", "leader", "kept"),
    [(0, dead_pid, False), (0, os.getpid, True), (0, lambda: 0, True), (1, dead_pid, True)],
    ids=["gone", "alive", "outside the namespace", "of another namespace"],
)
def test_a_session_s_file_is_removed_when_its_leader_is_known_to_be_gone(monkeypatch, namespace, leader, kept):
    pid = leader()
    own = stale_files.pid_namespace()
    with monkeypatch.context() as there:
        there.setattr(os, "getsid", lambda _: pid)
        there.setattr(stale_files, "pid_namespace", lambda: own + namespace)
        path = stale_files.session_file("loads")
    path.write_bytes(b"x")
    try:
        assert (path.name in clean_stale_segments()) is not kept
        assert path.exists() is kept
    finally:
        path.unlink(missing_ok=True)


def test_what_one_process_writes_another_reads_by_the_segment():
    buffer = FileBuffer(16, "own")
    try:
        buffer.tensor.fill_(7)
        assert open_shared(buffer.segment()).tolist() == [7] * 16
    finally:
        buffer.close()


@pytest.fixture
def name():
    """A buffer's name, whose file a test makes."""
    name = f"slimrl-named-1-{secrets.randbits(63)}"
    yield name
    (SHARED_MEMORY_DIR / name).unlink(missing_ok=True)


@pytest.mark.parametrize(
    "segment",
    ["../../etc/hostname", "/etc/hostname", "slimrl-a-1-1/../../../etc/hostname", "slimrl-x-1", "torch_1_2_3", "", "."],
)
def test_a_segment_of_another_name_opens_nothing(segment):
    with pytest.raises(ValueError, match="not the name of a shared buffer"):
        open_shared(segment)


@pytest.mark.parametrize("writable", [False, True])
def test_a_link_is_not_followed(tmp_path, name, writable):
    target = tmp_path / "target"
    target.write_bytes(b"secret")
    (SHARED_MEMORY_DIR / name).symlink_to(target)
    with pytest.raises(OSError, match="symbolic links"):
        open_shared(name, writable=writable)


def test_a_file_of_another_user_is_not_mapped(monkeypatch, name):
    (SHARED_MEMORY_DIR / name).write_bytes(b"theirs")
    assert open_shared(name).tolist() == list(b"theirs")
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(ValueError, match="not a shared buffer of this user"):
        open_shared(name)


def test_what_is_no_file_is_not_mapped(name):
    (SHARED_MEMORY_DIR / name).mkdir()
    try:
        with pytest.raises(ValueError, match="not a shared buffer of this user"):
            open_shared(name)
    finally:
        (SHARED_MEMORY_DIR / name).rmdir()


@pytest.mark.parametrize(("maker", "kept"), [(dead_pid, False), (os.getpid, True)], ids=["gone", "alive"])
def test_a_folder_in_which_processes_meet_is_removed_when_its_maker_is_gone(monkeypatch, maker, kept):
    pid = maker()
    with monkeypatch.context() as there:
        there.setattr(os, "getpid", lambda: pid)
        folder = meeting_folder("engine")
    path = Path(folder.name)
    (path / "ranks").touch()
    try:
        assert (path.name in clean_stale_segments()) is not kept
        assert path.exists() is kept
    finally:
        folder.cleanup()
    assert not path.exists()
