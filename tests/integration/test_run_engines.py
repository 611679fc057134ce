"""Runs whose engines share the trainer's devices, and runs that lose an engine in a rollout or a resync."""

import random
import signal
import time
from pathlib import Path

import pytest
from cli_runs import (
    RECIPES,
    CliRun,
    Workspace,
    end_when_joined,
    make_workspace,
    num_logged_steps,
    steps_without_times,
    succeed,
)

from slimrl.observability.metrics import read_metrics
from slimrl.observability.run_folder import RunFolder

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

GSPO = str(RECIPES / "gspo_calculator.yaml")
RUN_S = 250.0
LONG_TURNS = (
    "rollout.prompts_per_step=8",
    "rollout.sampling.max_new_tokens=600",
    "rollout.sampling.ignore_end_of_turn=true",
    "rollout.max_trajectory_tokens=1000",
)
"""Overrides of 32 turns of 600 tokens: seconds on any machine"""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return make_workspace(tmp_path_factory.mktemp("run_engines"))


def exported(folder: RunFolder) -> dict[str, bytes]:
    """The weight files of an export."""
    files = {path.name: path.read_bytes() for path in folder.export.glob("*.safetensors")}
    assert files
    return files


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_colocated_run_is_bit_identical_to_one_with_memory_of_its_own(workspace: Workspace, precision: str):
    names = [f"{precision}-apart", f"{precision}-colocated"]
    for name, colocated in zip(names, ("false", "true"), strict=True):
        overrides = workspace.overrides(
            f"run.name={name}",
            f"rollout.colocated={colocated}",
            f"trainer.precision={precision}",
            "algorithm.max_logprob_mismatch=1",
            "deterministic=true",
            "steps=2",
            "trainer.num_ranks=2",
            "trainer.parallel.expert=2",
            "rollout.num_engines=1",
            "checkpoint.every_steps=1",
            "eval.every_steps=1",
        )
        succeed("train", GSPO, *overrides, timeout_s=RUN_S)
    apart, colocated = map(workspace.run_folder, names)
    assert [line["policy/grad_norm"] > 0 for line in read_metrics(apart.metrics)[1:]] == [True] * 2
    assert steps_without_times(colocated) == steps_without_times(apart)
    assert exported(colocated) == exported(apart)
    # The engine of the one waits for the trainer's memory; that of the other starts with the trainer.
    given_away = "the trainer has released its memory; starting the engines"
    logs = [folder.log_file("driver").read_text() for folder in (apart, colocated)]
    assert [given_away in text for text in logs] == [False, True]
    assert logs[1].index(given_away) < logs[1].index("engine 0, actor")


def lose_an_engine(run: CliRun, folder: RunFolder, index: int) -> None:
    """Kill the engine between the first step's rollout and its resync."""
    sample: Path = folder.sample_file(1)
    run.wait_until(sample.is_file, RUN_S)
    run.kill_server(index)


@pytest.mark.full
def test_a_colocated_engine_that_is_gone_at_a_resync_is_replaced_and_all_get_the_weights_again(workspace: Workspace):
    folder = workspace.run_folder("replaced")
    overrides = workspace.overrides(
        "run.name=replaced",
        "steps=3",
        "rollout.num_engines=2",
        "rollout.colocated=true",
        "resync.verify=full",
        # A version more is sent to the engine that comes back.
        "reward.function=toy_reward:low_tokens_of_any_version",
    )
    run = CliRun(["train", GSPO, *overrides])
    try:
        lose_an_engine(run, folder, 1)
        assert run.wait(RUN_S) == 0, run.stderr
        assert run.left() == []
    finally:
        run.close()
    lines = read_metrics(folder.metrics)
    assert [line["resync/replaced_engines"] for line in lines] == [0, 1, 0, 0]
    assert [line["resync/version"] for line in lines] == [0, 2, 3, 4]
    assert [line["resync/fingerprint_mismatches"] for line in lines] == [0, 0, 0, 0]
    said = [line for line in (run.stdout + run.stderr).splitlines() if "replaced after the resync of version 1" in line]
    assert len(said) == 1
    assert "engine 1" in said[0]
    assert folder.export.is_dir()


def signal_in_rollout(run: CliRun, folder: RunFolder, step: int, number: signal.Signals) -> None:
    """Signal the server of engine 1 while a step rolls out, before its samples are there."""
    run.wait_until(lambda: num_logged_steps(folder) >= step, RUN_S)
    time.sleep(random.uniform(0.5, 1.5))
    run.signal_server(1, number)
    assert not folder.sample_file(step).exists()


@pytest.mark.full
def test_an_engine_that_is_gone_at_a_resync_is_restarted_beside_the_run_and_gets_a_later_version(workspace: Workspace):
    folder = workspace.run_folder("restarted")
    overrides = workspace.overrides("run.name=restarted", "steps=1000", "rollout.num_engines=2", "resync.verify=full")
    run = CliRun(["train", GSPO, *overrides])
    try:
        lose_an_engine(run, folder, 1)
        lines = end_when_joined(run, folder)
    finally:
        run.close()
    assert lines[1]["resync/replaced_engines"] == 1


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_ends_or_hangs_in_a_rollout_leaves_its_sessions_to_the_other(
    workspace: Workspace, number: signal.Signals
):
    name = f"lost-{number.name}"
    folder = workspace.run_folder(name)
    overrides = workspace.overrides(
        f"run.name={name}",
        "steps=1000",
        "trainer.num_ranks=1",
        "trainer.parallel.expert=1",
        "rollout.num_engines=2",
        "rollout.max_replacements=1",
        "rollout.health_timeout_s=5",
        *LONG_TURNS,
        "resync.verify=full",
    )
    run = CliRun(["train", GSPO, *overrides])
    try:
        signal_in_rollout(run, folder, 1, number)
        lines = end_when_joined(run, folder)
    finally:
        run.close()
    assert sum(line["rollout/retries"] for line in lines[1:]) > 0


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_colocated_engine_that_ends_or_hangs_in_a_rollout_is_replaced_at_the_next_resync(
    workspace: Workspace, number: signal.Signals
):
    name = f"colocated-{number.name}"
    folder = workspace.run_folder(name)
    overrides = workspace.overrides(
        f"run.name={name}",
        "steps=4",
        "rollout.num_engines=2",
        "rollout.colocated=true",
        "rollout.max_replacements=1",
        "rollout.health_timeout_s=5",
        *LONG_TURNS,
        "resync.verify=full",
        "reward.function=toy_reward:low_tokens_of_any_version",
    )
    run = CliRun(["train", GSPO, *overrides])
    try:
        signal_in_rollout(run, folder, 2, number)
        assert run.wait(RUN_S) == 0, run.stderr
        assert run.left() == []
    finally:
        run.close()
    lines = read_metrics(folder.metrics)
    # The other engine has taken the sessions over, and a version more is sent to the one that comes back.
    assert lines[2]["rollout/retries"] > 0
    assert {line["rollout/failed_fraction"] + line["rollout/aborted_fraction"] for line in lines[1:]} == {0}
    assert [line["resync/replaced_engines"] for line in lines] == [0, 0, 1, 0, 0]
    assert [line["resync/version"] for line in lines] == [0, 1, 3, 4, 5]
    assert [line["resync/engines"] for line in lines] == [2] * 5
    assert {line["resync/fingerprint_mismatches"] for line in lines} == {0}


@pytest.mark.full
@pytest.mark.parametrize(("engines", "limit"), [(2, 0), (1, 3)])
def test_a_run_that_may_replace_no_more_engines_or_has_none_left_stops(workspace: Workspace, engines: int, limit: int):
    name = f"stopped-{engines}"
    folder = workspace.run_folder(name)
    overrides = workspace.overrides(
        f"run.name={name}", "steps=3", f"rollout.num_engines={engines}", f"rollout.max_replacements={limit}"
    )
    run = CliRun(["train", GSPO, *overrides])
    try:
        lose_an_engine(run, folder, engines - 1)
        assert run.wait(RUN_S) == 1, run.stderr
        assert run.left() == []
    finally:
        run.close()
    assert f"engine {engines - 1} was ended by SIGKILL" in run.stderr
    assert "Traceback" not in run.stderr
    assert num_logged_steps(folder) == 1
