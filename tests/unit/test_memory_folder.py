"""Checkpoints in memory: which one a trainer goes on from, and what becomes of those that cannot be made."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from slimrl.base.errors import NotWritten, StageError, TrainerLost
from slimrl.base.folder_janitor import watch_over
from slimrl.checkpoints.digests import file_digests
from slimrl.config.schema.run import CheckpointConfig
from slimrl.observability.run_folder import RunFolder
from slimrl.runtime import memory_folder
from slimrl.runtime.checkpoint_writer import CheckpointWriter, WrittenAtOnce
from slimrl.runtime.memory_folder import MemoryFolder, newest_copy
from slimrl.runtime.state import CheckpointFolder, RunState

NEEDED = 1024**3
"""Bytes that a first copy takes at least"""


class OneNode:
    """Where all ranks are on the driver's node."""

    are_several = False

    def __init__(self, path: Path, timeout_s: float) -> None:
        self.not_copied: set[str] = set()
        self.copying: set[str] = set()

    def make(self, name):
        pass

    def rename(self, name, final, own):
        return {}

    def copy(self, name, files):
        pass

    def keep(self, names):
        self.kept = sorted(names)

    def is_copying(self, name):
        return name in self.copying

    def is_copied(self, name):
        return name not in self.not_copied | self.copying


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch, said: list[str]):
    monkeypatch.setattr(memory_folder, "MemoryNodes", OneNode)
    monkeypatch.setattr(memory_folder, "watch_over", lambda path: None)
    with MemoryFolder(said.append, 1.0, NEEDED) as folder:
        yield folder
    assert not folder.path.exists()


def write(text: str):
    def into(folder: Path):
        folder.mkdir()
        (folder / "weights").write_text(text)
        return file_digests(folder, ["weights"])

    return WrittenAtOnce(into)


def save(folder: CheckpointFolder, *steps: int) -> None:
    writer = CheckpointWriter(folder, CheckpointConfig(keep=1), lambda step: None)
    for step in steps:
        writer.begin(RunState(step=step), {"trainer": write(str(step))})
        writer.finish()


@pytest.mark.parametrize(
    ("on_disk", "in_memory", "newest"), [(None, 4, 4), (3, 4, 4), (4, 4, None), (5, 4, None), (3, None, None)]
)
def test_what_is_newer_wins_and_of_equals_the_disk(memory, said, tmp_path, on_disk, in_memory, newest):
    run = RunFolder(tmp_path)
    if on_disk:
        save(CheckpointFolder(run.checkpoints), on_disk)
    if in_memory:
        save(memory, in_memory)
    found = newest_copy(memory, run, said.append)
    assert newest_copy(None, run, said.append) is None
    if newest is None:
        assert (found, said) == (None, [])
    else:
        assert found == (memory.path / f"step_{newest:06d}", RunState(step=newest))
        assert said == [f"continuing after step {newest}, from the copy in memory"]


def test_one_that_is_not_whole_is_named_and_the_one_before_is_used(memory, said):
    memory.nodes.not_copied = {"step_000005"}
    save(memory, 4, 5)
    (memory.path / "step_000005" / "trainer" / "weights").write_text("6")
    path, state = memory.newest_after(0)
    assert (path.name, state.step) == ("step_000004", 4)
    assert said == ["warning: the copy of step_000005 in memory is not whole and is not used"]


def test_the_one_before_is_kept_until_the_next_is_on_two_nodes(memory, said):
    save(memory, 4)
    memory.nodes.not_copied = {"step_000005", "step_000006"}
    save(memory, 5)
    assert memory.steps() == [4, 5]
    save(memory, 6)
    assert memory.steps() == [4, 6]
    assert memory.nodes.kept == ["step_000004", "step_000006"]
    assert said == ["warning: step_000005 in memory would not survive the loss of a node: it is not copied"]
    memory.nodes.not_copied = set()
    save(memory, 7)
    assert memory.steps() == [7]


def test_a_step_does_not_wait_until_the_one_before_is_on_two_nodes(memory, said):
    save(memory, 4)
    memory.nodes.copying = {"step_000005"}
    save(memory, 5, 6)
    assert memory.steps() == [4, 5]
    assert memory.nodes.kept == ["step_000004", "step_000005"]
    assert said == []
    memory.nodes.copying = set()
    save(memory, 7)
    assert memory.steps() == [7]


def test_one_that_cannot_be_loaded_is_forgotten_and_a_checkpoint_on_the_disk_is_not(memory, tmp_path):
    memory.nodes.not_copied = {"step_000005"}
    save(memory, 4, 5)
    disk = CheckpointFolder(tmp_path)
    save(disk, 3)
    assert memory.forget(memory.named(5))
    assert memory.newest_after(0)[1].step == 4
    assert memory.nodes.kept == ["step_000004"]
    assert not memory.forget(disk.named(3))
    assert disk.steps() == [3]


def test_copies_behind_which_the_run_went_back_are_forgotten(memory):
    memory.nodes.not_copied = {"step_000005"}
    save(memory, 4, 5)
    memory.forget_after(4)
    assert memory.steps() == [4]


class Full:
    """Ranks that meet a full /dev/shm."""

    def __init__(self, error: StageError) -> None:
        self.error = error

    def begin_checkpoint(self, directory: Path) -> None:
        directory.mkdir()

    def has_written(self, directory: Path) -> bool:
        return True

    def finish_checkpoint(self, directory: Path):
        raise self.error


def test_one_that_cannot_be_written_does_not_end_the_run_and_leaves_nothing(memory, said):
    save(memory, 4)
    writer = CheckpointWriter(memory, CheckpointConfig(keep=1), lambda step: pytest.fail("it is not complete"))
    writer.begin(RunState(step=5), {"trainer": Full(NotWritten("trainer 0: No space left on device"))})
    writer.look()
    assert [path.name for path in memory.path.iterdir()] == ["step_000004"]
    (warning,) = said
    assert "the copy of step 5 in memory could not be made: trainer 0: No space left on device; " in warning
    assert not writer.holds(5)
    assert memory.newest_after(0)[1].step == 4
    # The others are no matter of room.
    for error in (TrainerLost("trainer 0: its process died"), StageError("trainer 0: ValueError")):
        writer.begin(RunState(step=5), {"trainer": Full(error)})
        with pytest.raises(type(error)):
            writer.look()


def test_a_copy_is_not_begun_without_the_room_that_the_last_one_took(memory, said, monkeypatch):
    # The first has no last one, and takes at least what the run says.
    monkeypatch.setattr(memory_folder.shutil, "disk_usage", lambda path: SimpleNamespace(free=NEEDED - 1))
    save(memory, 3)
    assert memory.steps() == []
    assert "step 3 in memory could not be made: it takes 1.0 GiB of /dev/shm, and 1.0 are free; " in said[0]
    monkeypatch.setattr(memory_folder.shutil, "disk_usage", lambda path: SimpleNamespace(free=NEEDED))
    save(memory, 4)
    monkeypatch.setattr(memory_folder.shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    save(memory, 5)
    assert memory.steps() == [4]
    assert "step 5 in memory could not be made: it takes 0.0 GiB of /dev/shm, and 0.0 are free; " in said[1]


def test_a_folder_goes_with_its_owner_however_that_ends(tmp_path: Path):
    folder = tmp_path / "folder"
    script = (
        "import os, sys; from pathlib import Path; from slimrl.base.folder_janitor import watch_over\n"
        "folder = Path(sys.argv[1]); folder.mkdir(); (folder / 'file').touch(); watch_over(folder)\n"
        "print('ready', flush=True); sys.stdin.read()"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", script, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout.readline() == "ready\n"
    assert (folder / "file").exists()
    owner.kill()
    owner.wait()
    deadline = time.monotonic() + 30
    while folder.exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_janitor_ends_without_its_folder(tmp_path: Path):
    folder = tmp_path / "folder"
    folder.mkdir()
    watch_over(folder)
    janitors = janitors_of(folder)
    assert janitors
    folder.rmdir()
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in janitors):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def janitors_of(folder: Path) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder) in path.read_text() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found
