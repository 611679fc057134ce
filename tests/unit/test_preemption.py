"""What SIGUSR1 does to a run."""

import os
import signal
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slimrl import cli
from slimrl.base.errors import Preempted, StepDropped
from slimrl.launch.slurm import PREEMPTED
from slimrl.observability.run_folder import RunFolder
from slimrl.runtime import commands
from slimrl.runtime.preemption import preemption_by_signal, raise_preempted

RECIPES = Path(__file__).parents[2] / "recipes" / "tiny_moe"


def test_a_signal_is_noted_and_the_step_may_go_on_for_the_grace():
    before = signal.getsignal(signal.SIGUSR1)
    with preemption_by_signal(0.05) as preemption:
        preemption.check()
        assert not preemption.asked
        os.kill(os.getpid(), signal.SIGUSR1)
        assert preemption.asked
        preemption.check()
        time.sleep(0.06)
        # A second signal does not prolong it.
        os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(StepDropped):
            preemption.check()
    assert signal.getsignal(signal.SIGUSR1) == before


def test_a_run_that_ended_early_is_marked_and_one_that_is_complete_is_not(tmp_path: Path):
    folder = RunFolder(tmp_path)
    raise_preempted(folder, 4, 4)
    assert not folder.requeue.exists()
    with pytest.raises(Preempted, match="after step 0 of 4: the same command with --resume-or-start starts anew"):
        raise_preempted(folder, 0, 4)
    (folder.checkpoints / "step_000003").mkdir(parents=True)
    with pytest.raises(Preempted, match="after step 3 of 4: the same command with --resume continues from there"):
        raise_preempted(folder, 3, 4)
    assert folder.requeue.read_text() == "3\n"


@pytest.mark.parametrize("command", ["train", "sft"])
def test_a_preempted_command_has_an_exit_code_of_its_own(monkeypatch: pytest.MonkeyPatch, command: str):
    asked = {}

    def preempted(path, overrides, **options):
        asked.update(options)
        raise Preempted("preempted by SIGUSR1")

    monkeypatch.setattr(commands, command, preempted)
    recipe = {"train": "gspo_calculator.yaml", "sft": "sft.yaml"}[command]
    arguments = [command, str(RECIPES / recipe), "--resume-or-start", "--job", "7", "--ray-address", "10.0.0.1:6379"]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == PREEMPTED == 75
    said = {
        "resume": None,
        "overwrite": False,
        "job": "7",
        "checkpoint_log": None,
        "ray_address": "10.0.0.1:6379",
        "profiled": None,
    }
    assert asked == said


@pytest.mark.parametrize("option", [("--resume-or-start",), ("--job", "7"), ("--checkpoint-log", "log")])
def test_training_on_a_file_refuses_what_is_about_checkpoints(option: tuple[str, ...]):
    arguments = ["train", "recipe.yaml", "--trajectories", "t.jsonl", "--steps", "1", *option]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 2
    assert f"{option[0]} cannot go with --trajectories" in result.output


@pytest.mark.parametrize("address", ["auto", "head", "head:", ":6379", "ray://head:10001"])
def test_an_address_that_is_not_host_and_port_is_refused(address: str):
    result = CliRunner().invoke(cli.app, ["sft", "recipe.yaml"], env={"SLIMRL_RAY_ADDRESS": address})
    assert result.exit_code == 2
    assert "HOST:PORT" in result.output
