"""A run in which a prompt's advantages are not finite: it skips the update and names them, or goes back without it."""

import json
from pathlib import Path

import pytest
from cli_runs import (
    RECIPES,
    CliRun,
    Workspace,
    exported,
    make_workspace,
    num_logged_steps,
    steps_without_times,
    succeed,
)

from slimrl.observability.metrics import read_metrics
from slimrl.observability.run_folder import RunFolder

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

GSPO = str(RECIPES / "gspo_calculator.yaml")
RUN_S = 400.0
LINE = 6
"""The prompt of the second step whose advantages are not finite, from 1"""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return make_workspace(tmp_path_factory.mktemp("not_finite"))


def data(workspace: Workspace, name: str, planted: tuple[int, ...], *, without: bool = False) -> Path:
    """The training file in which these lines are planted, or without them. Prompts keep their ids."""
    lines = [json.loads(line) for line in (workspace.path / "data" / "train.jsonl").read_text().splitlines()]
    made = []
    for number, line in enumerate(lines, 1):
        if number in planted and without:
            continue
        line = {**line, "id": f"prompt {number}"}
        if number in planted:
            line["metadata"] = {**line.get("metadata", {}), "planted": True}
        made.append(json.dumps(line) + "\n")
    file = workspace.path / f"{name}.jsonl"
    file.write_text("".join(made))
    return file


def settings(workspace: Workspace, name: str, file: Path, *more: str) -> list[str]:
    return workspace.overrides(
        f"run.name={name}",
        f"data.train={file}",
        "data.shuffle=false",
        "reward.function=toy_reward:beyond_32_bits",
        "algorithm.advantage=dr_grpo",
        "deterministic=true",
        "trainer.num_ranks=1",
        "trainer.parallel.expert=1",
        "rollout.num_engines=1",
        "checkpoint.every_steps=1",
        *more,
    )


REWINDS = ("stop.rewind_not_finite=true", "trainer.max_skipped_updates=1", "steps=4")


@pytest.fixture(scope="module")
def without(workspace: Workspace) -> RunFolder:
    """A run whose data never had the prompt."""
    succeed(
        "train", GSPO, *settings(workspace, "without", data(workspace, "without", (LINE,), without=True), *REWINDS),
        timeout_s=RUN_S,
    )  # fmt: skip
    return workspace.run_folder("without")


def test_an_update_that_is_not_finite_is_skipped_with_the_names_of_its_trajectories_and_the_run_goes_on(
    workspace: Workspace,
):
    folder, file = workspace.run_folder("skips"), data(workspace, "planted", (LINE,))
    output = succeed(
        "train", GSPO, *settings(workspace, "skips", file, "steps=3", "checkpoint.keep=3"), timeout_s=RUN_S
    )
    names = ", ".join(f"prompt {LINE} (step_000002/00001/{sample:03d})" for sample in range(4))
    said = f"step 2: update 2 of 2 skipped: the advantages of 4 of 8 trajectories are not finite: {names}"
    assert f"warning: {said}" in output.stdout
    assert f"the advantages of prompt {LINE} (step_000002/00001/003): " in folder.log_file("driver").read_text()
    assert [line["train/skipped_steps"] for line in read_metrics(folder.metrics)[1:]] == [0, 1, 1]
    kept = folder.not_finite_file(2, 2)
    # It makes the gradients once more from the weights that sampled it.
    sampled = f"model.megatron={folder.checkpoints / 'step_000001' / 'trainer'}"
    again = succeed(
        "train", GSPO, *settings(workspace, "again", file, sampled), "--trajectories", str(kept), "--steps", "1",
        timeout_s=RUN_S,
    )  # fmt: skip
    assert f"update 1 of 1 skipped: the advantages of 4 of 4 trajectories are not finite: {names}" in again.stdout


def test_a_run_that_goes_back_is_from_then_on_one_whose_data_never_had_the_prompt(
    workspace: Workspace, without: RunFolder
):
    folder, file = workspace.run_folder("rewinds"), data(workspace, "planted", (LINE,))
    output = succeed("train", GSPO, *settings(workspace, "rewinds", file, *REWINDS), timeout_s=RUN_S)
    assert (
        "the run goes back and leaves out 1 from now on: "
        f"prompt {LINE}" in output.stdout
    )  # fmt: skip
    assert "goes on after step 1" in output.stdout
    assert json.loads(folder.left_out.read_text()) == {"items": [f"prompt {LINE}"]}
    assert steps_without_times(folder) == steps_without_times(without)
    assert exported(folder) == exported(without)


@pytest.mark.full
def test_a_run_goes_back_behind_the_first_of_the_updates_that_were_skipped_in_a_row(workspace: Workspace):
    # Of steps 3, 4 and 5.
    planted = (LINE + 4, LINE + 8, LINE + 12)
    folder, file = workspace.run_folder("row"), data(workspace, "row", planted)
    overrides = settings(
        workspace, "row", file, "trainer.updates_per_rollout=1", "stop.rewind_not_finite=true",
        "trainer.max_skipped_updates=3", "checkpoint.every_steps=2", "checkpoint.in_memory_every_steps=1",
        "checkpoint.keep=4", "steps=6",
    )  # fmt: skip
    output = succeed("train", GSPO, *overrides, timeout_s=RUN_S)
    # The checkpoint and the copy of step 4 have its weights, and the row.
    assert "goes on after step 2" in output.stdout
    assert json.loads(folder.left_out.read_text()) == {"items": [f"prompt {line}" for line in planted]}
    assert [line["train/skipped_steps"] for line in read_metrics(folder.metrics)[1:]] == [0] * 6


@pytest.mark.full
def test_a_run_that_is_killed_after_it_went_back_leaves_out_the_same_when_it_is_resumed(
    workspace: Workspace, without: RunFolder
):
    folder, file = workspace.run_folder("killed"), data(workspace, "planted", (LINE,))
    run = CliRun(["train", GSPO, *settings(workspace, "killed", file, *REWINDS)])
    try:
        # The checkpoint that it goes on from knows nothing of it.
        run.wait_until(lambda: folder.left_out.is_file(), RUN_S)
        run.process.kill()
        run.wait(RUN_S)
    finally:
        run.close()
    assert num_logged_steps(folder) == 2
    resumed = succeed("train", GSPO, *settings(workspace, "killed", file, *REWINDS), "--resume", timeout_s=RUN_S)
    assert "goes back" not in resumed.stdout
    assert steps_without_times(folder) == steps_without_times(without)
    assert exported(folder) == exported(without)


@pytest.mark.full
def test_a_run_goes_back_once_and_ends_the_second_time_with_its_cause(workspace: Workspace):
    file = data(workspace, "twice", (LINE, 11))
    run = CliRun(["train", GSPO, *settings(workspace, "twice", file, *REWINDS)])
    try:
        assert run.wait(RUN_S) == 1
        assert run.left() == []
    finally:
        run.close()
    assert run.stdout.count("the run goes back and leaves out") == 1
    assert "The run had gone back before, which stop.rewind_not_finite does once" in run.stderr
    assert "1 optimizer updates in a row had a loss or a gradient that is not finite" in run.stderr


@pytest.mark.full
def test_groups_of_an_asynchronous_run_that_goes_back_add_up_and_none_is_of_the_prompt(workspace: Workspace):
    folder, file = workspace.run_folder("async"), data(workspace, "planted", (LINE,))
    overrides = settings(
        workspace, "async", file, "deterministic=false", "rollout.mode=async", "algorithm.correction.level=token",
        "stop.rewind_not_finite=true", "trainer.max_skipped_updates=1", "steps=6",
    )  # fmt: skip
    output = succeed("train", GSPO, *overrides, timeout_s=RUN_S)
    assert "the run goes back and leaves out" in output.stdout
    assert [line["step"] for line in read_metrics(folder.metrics)] == list(range(7))
    groups = [json.loads(line) for line in folder.groups.read_text().splitlines()]
    taken = [(line["step"], line["group"]) for line in groups if line["end"] == "taken"]
    assert sorted(step for step, _ in taken) == [step for step in range(1, 7) for _ in range(4)]
    assert len({group for _, group in taken}) == len(taken)
    of_prompt = [line["end"] for line in groups if line["prompt_id"] == f"prompt {LINE}"]
    assert set(of_prompt) <= {"dropped"}
