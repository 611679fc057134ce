"""The checkpoints of a run: which are kept, what is left of unfinished ones, and that damage is named."""

import errno
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import xxhash
from saved_checkpoints import save

from slimrl.base.errors import RunError, StageError
from slimrl.checkpoints.digests import FileDigest, file_digests
from slimrl.observability.run_folder import RunFolder
from slimrl.runtime import state as state_module
from slimrl.runtime.checks.checkpoint_check import check_checkpoint, check_exported, newest_checkpoint
from slimrl.runtime.state import CheckpointFolder, RunState

FILES = {
    "__0_0.distcp": bytes(range(256)) * 8192,
    "common.pt": b"common",
    ".metadata": b"pickled",
    "rng/00000.pt": b"r",
}
"""The first takes more than one read."""


def write_trainer(folder: Path) -> dict[str, FileDigest]:
    """As the trainer's ranks do; each checkpoint is different."""
    for name, content in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content + folder.parent.name.encode())
    return file_digests(folder, FILES)


def run_state(step: int) -> RunState:
    return RunState(step=step, weight_version=step + 1, cursor={"epoch": 1, "index": 3}, skipped_steps=2)


def saved(path: Path, *steps: int, keep: int = 9) -> CheckpointFolder:
    folder = CheckpointFolder(path)
    for step in steps:
        save(folder, run_state(step), keep, {"trainer": write_trainer})
    return folder


def names(folder: CheckpointFolder) -> list[str]:
    return sorted(path.name for path in folder.path.iterdir())


@pytest.mark.parametrize(("keep", "kept"), [(1, [30]), (2, [20, 30]), (3, [10, 20, 30]), (4, [10, 20, 30])])
def test_the_newest_checkpoints_are_kept_and_no_other(tmp_path: Path, keep: int, kept: list[int]):
    folder = saved(tmp_path, 10, 20, 30, keep=keep)
    assert names(folder) == [f"step_{step:06d}" for step in kept]
    assert [path.name for path in folder.complete()] == names(folder)


def test_steps_are_ordered_by_number_and_what_is_put_aside_is_no_checkpoint(tmp_path: Path):
    folder = saved(tmp_path, 999_999, 1_000_000)
    (tmp_path / "damaged_step_1000001").mkdir()
    (tmp_path / "step_1000002.bak").mkdir()
    assert [path.name for path in folder.complete()] == ["step_999999", "step_1000000"]
    found = newest_checkpoint(folder, contents=True)
    assert found is not None
    assert found.state == run_state(1_000_000)
    assert folder.holds(999_999)
    assert not folder.holds(1_000_001)


def test_a_checkpoint_that_was_put_aside_leaves_none_to_continue_from(tmp_path: Path):
    run = RunFolder(tmp_path)
    saved(run.checkpoints, 10)
    assert run.has_checkpoint
    (run.checkpoints / "step_000010").rename(run.checkpoints / "step_000010.bad")
    assert not run.has_checkpoint
    assert CheckpointFolder(run.checkpoints).complete() == []


def test_a_checkpoint_has_its_name_only_when_it_is_whole_and_a_new_one_removes_unfinished_ones(tmp_path: Path):
    folder = CheckpointFolder(tmp_path / "checkpoints")
    assert newest_checkpoint(folder, contents=True) is None
    write_trainer(folder.begin(3) / "trainer")
    assert folder.complete() == []
    assert not folder.holds(3)
    partial = folder.begin(4)
    assert names(folder) == [".partial_step_000004"]
    final = folder.finish(partial, run_state(4), {})
    assert (names(folder), final.name) == (["step_000004"], "step_000004")


def test_a_step_that_is_saved_again_takes_the_place_of_the_earlier_one(tmp_path: Path):
    folder = saved(tmp_path, 5)
    (tmp_path / "step_000005" / "stale").touch()
    saved(tmp_path, 5)
    assert names(folder) == ["step_000005"]
    assert not (tmp_path / "step_000005" / "stale").exists()


def test_the_state_comes_back_as_it_was_with_the_checksum_of_every_file(tmp_path: Path):
    folder = saved(tmp_path, 7)
    found = newest_checkpoint(folder, contents=True)
    assert found is not None
    assert (found.path, found.state, found.has_checksums) == (tmp_path / "step_000007", run_state(7), True)
    files = json.loads((found.path / "state.json").read_text())["files"]
    assert set(files) == {f"trainer/{name}" for name in FILES}
    for name, content in FILES.items():
        written = content + b".partial_step_000007"
        assert files[f"trainer/{name}"] == {
            "bytes": len(written),
            "xxh3_128": xxhash.xxh3_128_hexdigest(written),
        }


def test_a_critic_s_part_is_saved_checked_and_removed_with_the_trainer_s(tmp_path: Path):
    folder, state = CheckpointFolder(tmp_path), run_state(7)
    state.critic_skipped_in_a_row = 2
    parts = {"trainer": write_trainer, "critic": write_trainer}
    save(folder, state, 9, parts)
    final = tmp_path / "step_000007"
    files = json.loads((final / "state.json").read_text())["files"]
    assert set(files) == {f"{part}/{name}" for part in parts for name in FILES}
    found = newest_checkpoint(folder, contents=True)
    assert found is not None
    assert found.state == state
    flip(final / "critic" / "common.pt")
    with pytest.raises(ValueError, match=r"critic/common\.pt: its checksum differs"):
        newest_checkpoint(folder, contents=True)

    def fails(critic: Path) -> dict[str, FileDigest]:
        write_trainer(critic)
        raise StageError("critic 0: save_checkpoint: it died")

    with pytest.raises(RunError, match=r"checkpoint of step 8 could not be written: .*critic 0"):
        save(folder, run_state(8), 9, {**parts, "critic": fails})
    assert names(folder) == ["step_000007"]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


DAMAGES: list[tuple[str, Callable[[Path], None], str]] = [
    ("trainer/__0_0.distcp", flip, "trainer/__0_0.distcp: its checksum differs"),
    ("trainer/__0_0.distcp", cut, "trainer/__0_0.distcp: 2097169 bytes instead of 2097172"),
    ("trainer/common.pt", Path.unlink, "trainer/common.pt: missing"),
    ("trainer/.metadata", cut, "trainer/.metadata: 24 bytes instead of 27"),
    ("trainer/rng/00000.pt", flip, "trainer/rng/00000.pt: its checksum differs"),
    ("state.json", cut, "state.json: damaged"),
    ("state.json", Path.unlink, "state.json: No such file or directory"),
    ("state.json", lambda path: path.write_text("[1]"), "state.json: damaged"),
    (
        "state.json",
        lambda path: path.write_text(path.read_text().replace('"step": 20', '"step": 21')),
        "state.json: damaged: its checksum differs",
    ),
]


@pytest.mark.parametrize(("name", "damage", "said"), DAMAGES)
def test_damage_is_named_and_the_checkpoint_before_is_offered(
    tmp_path: Path, name: str, damage: Callable[[Path], None], said: str
):
    folder = saved(tmp_path, 10, 20)
    newest = tmp_path / "step_000020"
    damage(newest / name)
    with pytest.raises(ValueError, match="is damaged") as caught:
        newest_checkpoint(folder, contents=True)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{newest} is damaged:"
    assert lines[1].startswith(f"  {said}")
    command = lines[-1].split()
    assert lines[2:-1] == [
        f"{tmp_path / 'step_000010'} is intact. To continue from there, move the damaged away and give the same "
        "command again:"
    ]
    assert command[0] == "mv"
    shutil.move(*command[1:])
    found = newest_checkpoint(folder, contents=True)
    assert found is not None
    assert found.state == run_state(10)


def test_without_reading_the_contents_sizes_alone_are_compared(tmp_path: Path):
    folder = saved(tmp_path, 10)
    flip(tmp_path / "step_000010" / "trainer" / "__0_0.distcp")
    assert newest_checkpoint(folder, contents=False) is not None
    cut(tmp_path / "step_000010" / "trainer" / "__0_0.distcp")
    with pytest.raises(ValueError, match=r"__0_0\.distcp: .* instead of"):
        newest_checkpoint(folder, contents=False)


def test_of_several_damaged_ones_all_have_to_go_and_where_none_is_whole_that_is_said(tmp_path: Path):
    folder = saved(tmp_path, 10, 20, 30)
    for step in (20, 30):
        flip(tmp_path / f"step_{step:06d}" / "trainer" / "common.pt")
    with pytest.raises(ValueError, match="is damaged") as caught:
        newest_checkpoint(folder, contents=True)
    moved = [line.split()[1] for line in str(caught.value).splitlines() if line.startswith("  mv ")]
    assert moved == [str(tmp_path / "step_000030"), str(tmp_path / "step_000020")]
    flip(tmp_path / "step_000010" / "trainer" / "common.pt")
    with pytest.raises(ValueError, match="Restore it from a copy, or start anew with --overwrite"):
        newest_checkpoint(folder, contents=True)


def test_a_damaged_checkpoint_is_not_exported_and_another_is_named(tmp_path: Path):
    saved(tmp_path, 10, 20)
    check_exported(tmp_path / "step_000020")
    flip(tmp_path / "step_000020" / "trainer" / "__0_0.distcp")
    with pytest.raises(ValueError, match=rf"__0_0\.distcp: .*\n.*{tmp_path}/step_000010 is intact") as caught:
        check_exported(tmp_path / "step_000020")
    assert "mv" not in str(caught.value)
    check_exported(tmp_path / "step_000010")


def test_a_checkpoint_that_was_written_without_checksums_is_taken_and_says_so(tmp_path: Path):
    checkpoint = tmp_path / "step_000010"
    checkpoint.mkdir()
    (checkpoint / "state.json").write_text(json.dumps(asdict(run_state(10))))
    found = check_checkpoint(checkpoint, contents=True)
    assert (found.state, found.has_checksums) == (run_state(10), False)


def test_a_checkpoint_that_cannot_be_written_leaves_nothing_and_the_one_before_is_named(tmp_path: Path):
    folder = saved(tmp_path, 10)

    def fails(trainer: Path) -> dict[str, FileDigest]:
        write_trainer(trainer)
        raise StageError("trainer 0: save_checkpoint: RuntimeError: No space left on device", "all tracebacks")

    with pytest.raises(RunError, match="checkpoint of step 20 could not be written") as caught:
        save(folder, run_state(20), 2, {"trainer": fails})
    assert "No space left on device" in str(caught.value)
    assert f"--resume continues from {tmp_path / 'step_000010'}" in str(caught.value)
    assert getattr(caught.value, "details", "") == "all tracebacks"
    assert names(folder) == ["step_000010"]


def test_a_full_disk_is_called_so_whatever_the_library_says_of_it(tmp_path: Path, monkeypatch):
    def obscure(trainer: Path) -> dict[str, FileDigest]:
        raise StageError("unexpected pos 704 vs 598")

    for free, said in ((3e6, "no space left on the disk"), (3e12, "could not be written: unexpected pos")):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        with pytest.raises(RunError, match=said):
            save(CheckpointFolder(tmp_path), run_state(20), 2, {"trainer": obscure})


@pytest.mark.parametrize("place", ["fsync", "begin"])
def test_a_disk_that_fills_up_at_the_driver_is_the_same_error(tmp_path: Path, monkeypatch, place: str):
    def full(*about):
        raise OSError(errno.ENOSPC, "No space left on device")

    if place == "fsync":
        monkeypatch.setattr(state_module.os, "fsync", full)
    else:
        monkeypatch.setattr(CheckpointFolder, "begin", full)
    folder = CheckpointFolder(tmp_path)
    with pytest.raises(RunError, match=r"No space left on device\. There is none before it\."):
        save(folder, run_state(20), 2, {"trainer": write_trainer})
    assert names(folder) == []


def test_a_checkpoint_that_cannot_be_removed_whole_does_not_end_the_run_and_keeps_no_name(
    tmp_path: Path, monkeypatch, caplog
):
    folder = saved(tmp_path, 10)

    def busy(path: Path) -> None:
        (path / "trainer" / "common.pt").unlink()
        raise OSError(errno.EBUSY, "Device or resource busy", str(path))

    with monkeypatch.context() as held:
        held.setattr(shutil, "rmtree", busy)
        saved(tmp_path, 20, keep=1)
    assert names(folder) == [".partial_step_000010", "step_000020"]
    assert "step_000010 could not be removed" in caplog.text
    saved(tmp_path, 30, keep=1)
    assert names(folder) == ["step_000030"]


def test_every_file_of_a_checkpoint_is_hashed_by_one_of_the_ranks_that_by_its_name_wrote_it(tmp_path: Path):
    from slimrl.trainer.checkpointing.writing import _written_by

    by_rank = {
        0: ["__0_0.distcp", ".metadata", "checkpoint.json", "common.pt", "hf/config.json", "rng/00000.pt"],
        1: ["__1_0.distcp", "__1_1.distcp", "rng/00001.pt"],
        11: ["__11_1.distcp", "rng/00011.pt"],
        12: [],
    }
    for name in (name for files in by_rank.values() for name in files):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert {rank: sorted(_written_by(tmp_path, rank)) for rank in by_rank} == {
        rank: sorted(files) for rank, files in by_rank.items()
    }
