"""Run folders by the real command: secrets, locks, damaged checkpoints, full disks."""

import ctypes
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_runs import RECIPES, CliRun, Workspace, make_workspace, run_cli, steps_without_times, succeed

from slimrl.observability.run_folder import RunFolder

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

GSPO, SFT = str(RECIPES / "gspo_calculator.yaml"), str(RECIPES / "sft.yaml")
RUN_S = 300.0
SECRET = "hunter2-is-no-s3cret-4711"


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return make_workspace(tmp_path_factory.mktemp("run_folders"))


def sft(workspace: Workspace, name: str, *more: str) -> list[str]:
    return [
        "sft",
        SFT,
        f"run.dir={workspace.path / 'runs'}",
        f"run.name={name}",
        f"model.path={workspace.path / 'model'}",
        f"data.train={workspace.path / 'data' / 'sft.jsonl'}",
        "deterministic=true",
        "trainer.num_ranks=1",
        "trainer.parallel.expert=1",
        "trainer.optimizer.warmup_updates=2",
        "steps=6",
        "checkpoint.every_steps=2",
        "tracking.wandb=disabled",
        *more,
    ]


def names(folder: RunFolder) -> list[str]:
    return sorted(path.name for path in folder.checkpoints.iterdir())


@pytest.mark.full
def test_flipped_bytes_are_named_and_the_run_goes_on_from_the_checkpoint_that_is_offered(workspace: Workspace):
    run = workspace.run_folder("damaged")
    succeed(*sft(workspace, "damaged"), timeout_s=RUN_S)
    whole = steps_without_times(run)
    # As after a crash behind the checkpoint of step 6, before the export.
    shutil.rmtree(run.export)
    newest = run.checkpoints / "step_000006"
    victim = newest / "trainer" / "__0_0.distcp"
    content = bytearray(victim.read_bytes())
    for place in range(20):
        content[len(content) // 3 + 1000 * place] ^= 0xFF
    victim.write_bytes(content)
    resume = [*sft(workspace, "damaged"), "--resume"]
    refused = run_cli(*resume, timeout_s=RUN_S)
    assert refused.process.returncode == 2
    assert "starting" not in refused.stdout
    lines = refused.stderr.splitlines()
    assert lines[0] == f"{newest} is damaged:"
    assert lines[1] == "  trainer/__0_0.distcp: its checksum differs"
    assert lines[2].startswith(f"{run.checkpoints / 'step_000004'} is intact. To continue from there,")
    assert lines[3:] == [f"  mv {newest} {newest.with_name('damaged_step_000006')}"]
    shutil.move(*lines[3].split()[1:])
    succeed(*resume, timeout_s=RUN_S)
    assert steps_without_times(run) == whole
    assert run.export.is_dir()


@pytest.mark.full
def test_a_run_that_lives_is_neither_resumed_nor_overwritten(workspace: Workspace):
    run = workspace.run_folder("live")
    first = CliRun(sft(workspace, "live", "steps=100000"))
    try:
        first.wait_until((run.checkpoints / "step_000002").is_dir, RUN_S)
        for flag in ("--resume", "--overwrite"):
            second = run_cli(*sft(workspace, "live", "steps=100000"), flag, timeout_s=RUN_S)
            assert second.process.returncode == 2
            assert f"{run.path} is in use by process {first.process.pid} on " in second.stderr
        assert first.process.poll() is None
        first.process.send_signal(signal.SIGKILL)
        first.wait(60)
    finally:
        first.close()
    # A killed driver holds nothing.
    third = CliRun([*sft(workspace, "live", "steps=100000"), "--resume"])
    try:
        begun = names(run)[-1]
        third.wait_until(lambda: names(run)[-1] > begun, RUN_S)
    finally:
        third.process.send_signal(signal.SIGTERM)
        third.wait(60)
        third.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that holds two checkpoints, not three."""
    folder, libc = tmp_path / "disk", ctypes.CDLL(None, use_errno=True)
    folder.mkdir()
    if libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, b"size=14m"):
        pytest.skip(f"mounting a tmpfs is refused: {os.strerror(ctypes.get_errno())}")
    try:
        yield folder
    finally:
        libc.umount2(os.fsencode(folder), 2)


@pytest.mark.full
def test_a_disk_that_fills_up_in_a_checkpoint_is_one_error_and_gets_its_room_back(
    workspace: Workspace, small_disk: Path
):
    failed = run_cli(*sft(workspace, "full", f"run.dir={small_disk}"), timeout_s=RUN_S)
    assert failed.process.returncode == 1
    checkpoints = RunFolder(small_disk / "full").checkpoints
    line, logs = failed.stderr.splitlines()
    assert logs == f"logs: {RunFolder(small_disk / 'full').logs}"
    assert line.startswith(
        f"failed: the checkpoint of step 6 could not be written: no space left on the disk of {checkpoints} "
    )
    assert line.endswith(f"--resume continues from {checkpoints / 'step_000004'}.")
    assert names(RunFolder(small_disk / "full")) == ["step_000002", "step_000004"]
    assert shutil.disk_usage(small_disk).free > 2e6


@pytest.mark.full
def test_no_file_that_a_run_writes_has_what_it_read_from_the_environment(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SLIMRL_TEST_SECRET", SECRET)
    arguments = workspace.overrides(
        "run.name=secret",
        "steps=1",
        "checkpoint.every_steps=1",
        "trainer.num_ranks=1",
        "trainer.parallel.expert=1",
        "rollout.num_engines=1",
        "rollout.sglang.served_model_name=${oc.env:SLIMRL_TEST_SECRET}",
        "rollout.sglang.log_level=info",
        "tracking.wandb=offline",
    )
    succeed("train", GSPO, *arguments, timeout_s=RUN_S)
    run = workspace.run_folder("secret")
    succeed("train", GSPO, *arguments, "steps=2", "--resume", timeout_s=RUN_S)
    written = [path for path in run.path.rglob("*") if path.is_file()]
    assert {"config.yaml", "config.resumed.yaml", "provenance.json", "driver.log", "engine_0.log"} <= {
        path.name for path in written
    }
    assert any(path.suffix == ".wandb" for path in written)
    assert [path for path in written if SECRET.encode() in path.read_bytes()] == []
    assert "${oc.env:SLIMRL_TEST_SECRET}" in run.config.read_text()
    assert "server_args=see config.yaml of the run" in run.log_file("engine_0").read_text()
