"""Runs on a cluster of two nodes that somebody else has started."""

import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from cli_runs import (
    ENGINE,
    RECIPES,
    CliRun,
    Workspace,
    end_when_joined,
    engine_server,
    make_workspace,
    num_logged_steps,
    run_cli,
    steps_without_times,
    succeed,
)
from ray_nodes import RayNodes

from slimrl.observability.metrics import read_metrics
from slimrl.observability.run_folder import RunFolder
from slimrl.resync.ipc.shared_buffer import SHARED_MEMORY_DIR

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

GSPO = str(RECIPES / "gspo_calculator.yaml")
RUN_S = 250.0
LOSS_S = 120.0
"""From the death of a node to the end of the command; the cluster takes a quarter of a minute to notice."""
STOPPED_S = 6.0
"""Longer than the training between a rollout and its resync on an idle machine, shorter than a resync's deadline"""
SPREAD = ("rollout.engine_tp=2", "rollout.engine_nodes=2")
OURS = ("ray::TrainerActor", "ray::EngineActor", "slimrl.engines.plugin.launch")

StartNodes = Callable[..., RayNodes]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return make_workspace(tmp_path_factory.mktemp("two_nodes"))


@pytest.fixture
def start_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[StartNodes]:
    started = []

    def start(*cores: int) -> RayNodes:
        started.append(RayNodes(*cores))
        for name, value in started[-1].environment.items():
            monkeypatch.setenv(name, value)
        return started[-1]

    yield start
    for nodes in started:
        nodes.close()


def overrides(workspace: Workspace, name: str, *more: str) -> list[str]:
    return workspace.overrides(
        f"run.name={name}",
        "steps=2",
        "deterministic=true",
        "trainer.num_ranks=2",
        "trainer.parallel.expert=2",
        "rollout.num_engines=2",
        "resync.verify=full",
        *more,
    )


def local_dir(transport: str, path: Path) -> list[str]:
    return [f"resync.local_dir={path / 'local'}"] if transport == "delta" else []


def die_in_a_resync(server: psutil.Process, run: CliRun, folder: RunFolder, transport: str) -> None:
    """Stop the server and its children, so that the first step's resync waits for them, and kill it then."""
    for member in (server, *server.children(recursive=True)):
        member.suspend()
    if transport == "p2p":
        time.sleep(STOPPED_S)
    else:
        run.wait_until((folder.path / "resync" / "v000001").is_dir, RUN_S)
        time.sleep(0.5)
    assert num_logged_steps(folder) == 1
    # The kernel kills the children with it.
    server.kill()


def nodes_of_slots(folder: RunFolder) -> list[str]:
    """Names of the nodes of the run's slots, as the driver's log has them."""
    lines = folder.log_file("driver").read_text().splitlines()
    return [line.split(": ")[2].split()[0] for line in lines if " slot " in line]


def exported(folder: RunFolder) -> dict[str, bytes]:
    files = {path.name: path.read_bytes() for path in folder.export.glob("*.safetensors")}
    assert files
    return files


@pytest.mark.full
def test_a_node_that_dies_in_the_middle_is_named_and_the_run_ends(workspace: Workspace, start_nodes: StartNodes):
    nodes = start_nodes(1, 1)
    folder = workspace.run_folder("lost")
    more = overrides(workspace, "lost", "steps=1000", "run.max_restarts=0")
    run = CliRun(["train", GSPO, *more, "--ray-address", nodes.address])
    try:
        run.wait_until(lambda: num_logged_steps(folder) >= 3, RUN_S)
        for index in (0, 1):
            lines = nodes.command_lines(index)
            assert [sum(text in line for line in lines) for text in OURS[:2]] == [1, 1], lines
        start = time.monotonic()
        nodes.kill_raylet(1)
        assert run.wait(LOSS_S) == 1, run.stderr
        assert time.monotonic() - start < LOSS_S
    finally:
        run.close()
    first, second = nodes_of_slots(folder)
    assert first != second
    assert f"its node {second} was lost" in run.stderr
    assert "Traceback" not in run.stderr
    assert nodes.left(*OURS) == []
    # Each engine got, from the rank on its own node, what the trainer has.
    assert [line["resync/fingerprint_mismatches"] for line in read_metrics(folder.metrics)][:3] == [0, 0, 0]
    assert [line["policy/grad_norm"] > 0 for line in read_metrics(folder.metrics)[1:3]] == [True, True]


@pytest.mark.full
def test_ranks_on_two_nodes_find_a_damaged_checkpoint_and_say_how_the_run_goes_on(
    workspace: Workspace, start_nodes: StartNodes
):
    nodes = start_nodes(1, 1)
    folder = workspace.run_folder("flipped")
    more = overrides(workspace, "flipped", "checkpoint.every_steps=1")
    succeed("train", GSPO, *more, "--ray-address", nodes.address, timeout_s=RUN_S)
    newest = folder.checkpoints / "step_000002"
    victim = newest / "trainer" / "__1_0.distcp"
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    resume = ["train", GSPO, *more, "steps=3", "--ray-address", nodes.address, "--resume"]
    refused = run_cli(*resume, timeout_s=RUN_S)
    assert refused.process.returncode == 1
    lines = refused.stderr.splitlines()
    assert lines[:2] == [f"failed: {newest} is damaged:", "  trainer/__1_0.distcp: its checksum differs"]
    assert lines[2].startswith(f"{newest.with_name('step_000001')} has all of its files")
    assert nodes.left(*OURS) == []
    shutil.move(*lines[3].split()[1:])
    succeed(*resume, timeout_s=RUN_S)
    assert [line["step"] for line in read_metrics(folder.metrics)] == [0, 1, 2, 3]


@pytest.mark.full
def test_a_head_that_is_lost_is_named_and_the_run_ends(workspace: Workspace, start_nodes: StartNodes):
    nodes = start_nodes(1, 1)
    folder = workspace.run_folder("headless")
    run = CliRun(["train", GSPO, *overrides(workspace, "headless", "steps=1000"), "--ray-address", nodes.address])
    try:
        run.wait_until(lambda: num_logged_steps(folder) >= 2, RUN_S)
        (head,) = nodes.running("gcs_server")
        head.kill()
        assert run.wait(LOSS_S) == 1, run.stderr
    finally:
        run.close()
    assert " ".join(run.stderr.split()).count(f"failed: Ray's head at {nodes.address} is lost") == 1, run.stderr
    assert "Traceback" not in run.stderr
    assert nodes.left(*OURS) == []


@pytest.mark.full
@pytest.mark.timeout(900)
def test_ranks_of_a_lost_node_start_on_a_spare_one_and_the_run_goes_on(workspace: Workspace, start_nodes: StartNodes):
    nodes = start_nodes(1, 1, 1, 1)
    folder = workspace.run_folder("spare")
    more = overrides(
        workspace, "spare", "steps=5", "resync.transport=p2p", "rollout.num_engines=1", "checkpoint.every_steps=1",
        "trainer.spare_nodes=1",
    )  # fmt: skip
    run = CliRun(["train", GSPO, *more, "--ray-address", nodes.address])
    try:
        run.wait_until(lambda: num_logged_steps(folder) >= 3, RUN_S)
        # Not the one with the head of the cluster.
        lost = next(index for index in (1, 2, 3) if any(OURS[0] in line for line in nodes.command_lines(index)))
        nodes.kill_raylet(lost)
        assert run.wait(RUN_S) == 0, run.stderr
    finally:
        run.close()
    assert re.search(r"warning: trainer [01]: its node \S+ was lost during .*; the trainer is started anew", run.stdout)
    log = folder.log_file("driver").read_text()
    (spare,) = re.findall(r"spare_nodes: (\S+) is kept free", log)
    assert re.findall(r"ranks of \S+ start on (\S+)", log) == [spare]
    assert spare not in nodes_of_slots(folder)[:3]
    assert run.stdout.count("the trainer has started again after") == 1
    lines = read_metrics(folder.metrics)
    assert [line["step"] for line in lines] == list(range(6))
    assert {line["resync/fingerprint_mismatches"] for line in lines} == {0}
    assert [line["policy/grad_norm"] > 0 for line in lines[1:]] == [True] * 5
    assert nodes.left(*OURS) == []


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_lost_node_takes_no_copy_in_memory_with_it(workspace: Workspace, start_nodes: StartNodes):
    """The ranks go on from each other's memory, bit for bit, without a checkpoint on the disk."""
    before = memory_folders()
    # Several of these short steps end before a node's first copy is on another one.
    more = ("steps=40", "resync.transport=p2p", "rollout.num_engines=1")
    succeed("train", GSPO, *overrides(workspace, "undisturbed", *more), timeout_s=RUN_S)
    nodes = start_nodes(1, 1, 1, 1)
    folder, whole = workspace.run_folder("copied"), workspace.run_folder("undisturbed")
    settings = overrides(workspace, "copied", *more, "checkpoint.in_memory_every_steps=1")
    run = CliRun(["train", GSPO, *settings, "--ray-address", nodes.address])
    try:
        run.wait_until(lambda: any(map(has_files_of_both, set(memory_folders()) - set(before))), RUN_S)
        assert len(memory_folders()) == len(before) + 2
        lost = next(index for index in (1, 2, 3) if any(OURS[0] in line for line in nodes.command_lines(index)))
        nodes.kill_raylet(lost)
        assert run.wait(RUN_S) == 0, run.stderr
    finally:
        run.close()
    (step,) = re.findall(r"the trainer has started again after \S+ s, and goes on after step (\d+)", run.stdout)
    # The newest whose files were on two nodes by then.
    assert int(step) >= 1, run.stdout
    assert f"continuing after step {step}, from the copy in memory" in run.stdout
    assert steps_without_times(folder) == steps_without_times(whole)
    assert exported(folder) == exported(whole)
    assert nodes.left(*OURS) == []
    assert memory_folders(await_count=len(before)) == before


def has_files_of_both(folder: Path) -> bool:
    """Whether a node's folder has a copy with the files of both ranks, which are on two nodes."""
    return any(
        {"0", "1"} <= {file.name.split("_")[2] for file in step.glob("trainer/__*.distcp")}
        for step in folder.glob("step_*")
    )


def memory_folders(*, await_count: int | None = None) -> list[Path]:
    """Folders of copies in memory, after the end of janitors where so many are expected."""
    deadline = time.monotonic() + LOSS_S
    while True:
        found = sorted(SHARED_MEMORY_DIR.glob("slimrl-checkpoints_*"))
        if await_count in (None, len(found)) or time.monotonic() > deadline:
            return found
        time.sleep(0.5)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_an_engine_joins_with_a_node_and_leaves_with_it_and_the_run_goes_on(
    workspace: Workspace, start_nodes: StartNodes
):
    nodes = start_nodes(2)
    folder = workspace.run_folder("elastic")
    log = folder.log_file("driver")
    elastic = ("rollout.num_engines=2", "rollout.min_engines=1", "rollout.mode=async", "deterministic=false")
    more = overrides(
        workspace, "elastic", *elastic, "steps=100000", "resync.transport=p2p", "trainer.num_ranks=1",
        "trainer.parallel.expert=1", "reward.function=toy_reward:low_tokens_of_any_version", "resync.timeout_s=20",
        "algorithm.correction.level=token", "algorithm.score_every_steps=1",
    )  # fmt: skip
    run = CliRun(["train", GSPO, *more, "--ray-address", nodes.address])

    def engines_are(count: int) -> bool:
        lines = read_metrics(folder.metrics) if folder.metrics.is_file() else []
        return len(lines) > 2 and [line["resync/engines"] for line in lines[-2:]] == [count] * 2

    try:
        run.wait_until(lambda: engines_are(1), RUN_S, poll_s=0.5)
        nodes.join(1)
        run.wait_until(lambda: engines_are(2), RUN_S, poll_s=0.5)
        nodes.kill_raylet(1)
        run.wait_until(lambda: "the run goes on without engine 1" in log.read_text(), LOSS_S, poll_s=0.5)
        run.wait_until(lambda: engines_are(1), RUN_S, poll_s=0.5)
        run.process.send_signal(signal.SIGUSR1)
        assert run.wait(LOSS_S) == 75, run.stderr
    finally:
        run.close()
    lines = read_metrics(folder.metrics)
    assert {line["resync/fingerprint_mismatches"] for line in lines} == {0}
    assert max(line["mismatch/logprob_abs_mean"] for line in lines[1:]) < 1e-4
    assert "engine 1 is added on" in log.read_text()
    assert nodes.left(*OURS) == []


@pytest.mark.full
def test_a_run_on_two_nodes_is_bit_identical_to_one_on_this_machine_and_leaves_the_nodes_running(
    workspace: Workspace, start_nodes: StartNodes, tmp_path: Path
):
    nodes = start_nodes(1, 1)
    address = ["--ray-address", nodes.address]
    succeed("train", GSPO, *overrides(workspace, "two"), *address, timeout_s=RUN_S)
    assert nodes.left(*OURS) == []
    assert all(any("raylet" in line for line in nodes.command_lines(index)) for index in (0, 1))
    succeed("train", GSPO, *overrides(workspace, "one"), timeout_s=RUN_S)
    two, one = workspace.run_folder("two"), workspace.run_folder("one")
    assert len(set(nodes_of_slots(two))) == 2
    assert len(set(nodes_of_slots(one))) == 1
    assert steps_without_times(two) == steps_without_times(one)
    assert exported(two) == exported(one)
    # The cluster is free for the next command.
    out = tmp_path / "trajectories.jsonl"
    succeed("rollout", GSPO, *workspace.overrides(), *address, "--out", str(out), timeout_s=RUN_S)
    assert out.is_file()


@pytest.mark.full
def test_engines_on_cores_of_their_own_get_the_weights_over_the_network(workspace: Workspace, start_nodes: StartNodes):
    nodes = start_nodes(1, 3)
    more = overrides(workspace, "p2p", "resync.transport=p2p")
    succeed("train", GSPO, *more, "--ray-address", nodes.address, timeout_s=RUN_S)
    folder = workspace.run_folder("p2p")
    sender, _, *engines = nodes_of_slots(folder)
    # Which of the nodes Ray takes for the driver's, whose slots come first, is chance where they share an address.
    assert any(engine != sender for engine in engines)
    lines = read_metrics(folder.metrics)
    assert [line["resync/fingerprint_mismatches"] for line in lines] == [0, 0, 0]
    assert [line["policy/grad_norm"] > 0 for line in lines[1:]] == [True, True]


@pytest.mark.full
@pytest.mark.parametrize("transport", ["p2p", "disk", "delta"])
def test_an_engine_over_both_nodes_gets_the_weights_on_each_and_generates(
    workspace: Workspace, start_nodes: StartNodes, tmp_path: Path, transport: str
):
    nodes = start_nodes(2, 2)
    name = f"spread-{transport}"
    more = overrides(
        workspace, name, *SPREAD, f"resync.transport={transport}", *local_dir(transport, tmp_path),
        "trainer.num_ranks=1", "trainer.parallel.expert=1", "rollout.num_engines=1",
    )  # fmt: skip
    succeed("train", GSPO, *more, "--ray-address", nodes.address, timeout_s=RUN_S)
    folder = workspace.run_folder(name)
    rank, *engine = nodes_of_slots(folder)
    assert len(set(engine)) == len(engine) == 2
    assert rank in engine
    log = folder.log_file("driver").read_text()
    assert all(f"engine 0, server on {node}" in log for node in engine)
    lines = read_metrics(folder.metrics)
    assert [line["resync/fingerprint_mismatches"] for line in lines] == [0, 0, 0]
    assert [line["policy/grad_norm"] > 0 for line in lines[1:]] == [True, True]
    assert max(line["mismatch/logprob_abs_mean"] for line in lines[1:]) < 1e-4
    if transport == "delta":
        assert [line.get("resync/changed_fraction", 0) > 0 for line in lines] == [False, True, True]
    assert nodes.left(*OURS) == []


@pytest.mark.full
@pytest.mark.parametrize("transport", ["ipc", "disk"])
def test_a_colocated_engine_over_both_nodes_gives_the_bits_of_one_on_a_node_with_memory_of_its_own(
    workspace: Workspace, start_nodes: StartNodes, transport: str
):
    nodes = start_nodes(1, 1)
    both = ("rollout.num_engines=1", "rollout.engine_tp=2", f"resync.transport={transport}", "eval.every_steps=1")
    colocated = ("rollout.engine_nodes=2", "rollout.colocated=true", "checkpoint.every_steps=1")
    more = overrides(workspace, f"shared-{transport}", *both, *colocated)
    succeed("train", GSPO, *more, "--ray-address", nodes.address, timeout_s=RUN_S)
    succeed("train", GSPO, *overrides(workspace, f"apart-{transport}", *both), timeout_s=RUN_S)
    shared, apart = workspace.run_folder(f"shared-{transport}"), workspace.run_folder(f"apart-{transport}")
    assert len(set(nodes_of_slots(shared))) == len(nodes_of_slots(shared)) == 2
    assert len(set(nodes_of_slots(apart))) == 1
    assert "the trainer has released its memory; starting the engines" in shared.log_file("driver").read_text()
    assert [line["resync/fingerprint_mismatches"] for line in read_metrics(shared.metrics)] == [0, 0, 0]
    assert steps_without_times(shared) == steps_without_times(apart)
    assert exported(shared) == exported(apart)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("moment", "transport"), [("rollout", "disk"), ("resync", "p2p"), ("resync", "delta")])
def test_an_engine_that_loses_its_part_on_the_second_node_is_replaced_on_both(
    workspace: Workspace, start_nodes: StartNodes, tmp_path: Path, moment: str, transport: str
):
    nodes = start_nodes(3, 3)
    name = f"part-{moment}-{transport}"
    folder = workspace.run_folder(name)
    # Turns of 600 tokens take seconds on any machine.
    long_turns = (
        "rollout.sampling.max_new_tokens=600", "rollout.sampling.ignore_end_of_turn=true",
        "rollout.max_trajectory_tokens=1000",
    )  # fmt: skip
    more = overrides(
        workspace, name, *SPREAD, f"resync.transport={transport}", *local_dir(transport, tmp_path),
        "deterministic=false", "trainer.num_ranks=1", "trainer.parallel.expert=1", "rollout.max_replacements=1",
        "steps=1000", *(long_turns if moment == "rollout" else ()),
    )  # fmt: skip
    run = CliRun(["train", GSPO, *more, "--ray-address", nodes.address])
    try:
        if moment == "rollout":
            run.wait_until(lambda: num_logged_steps(folder) >= 1, 2 * RUN_S)
            time.sleep(1.0)
            engine_server(nodes.running(ENGINE), "engine_1_part_1.log").kill()
            assert not folder.sample_file(1).exists()
        else:
            run.wait_until(folder.sample_file(1).is_file, 2 * RUN_S)
            die_in_a_resync(engine_server(nodes.running(ENGINE), "engine_1_part_1.log"), run, folder, transport)
        lines = end_when_joined(run, folder)
    finally:
        run.close()
    assert lines[1]["resync/replaced_engines"] == 1
    log = folder.log_file("driver").read_text()
    (said,) = [line for line in log.splitlines() if "restarted while the others go on" in line]
    call = {"p2p": r"engine 1, \w+:", "delta": "engine 1, update_weights_from_disk:"}
    assert re.search(call.get(transport, "engine 1 part 1 was ended by SIGKILL"), said)
    servers = [line for line in log.splitlines() if "engine 1, server on" in line]
    assert [len({line.split()[-1] for line in started}) for started in (servers[:2], servers[2:])] == [2, 2]
    assert nodes.left(*OURS) == []


@pytest.mark.full
def test_a_cluster_that_is_too_small_is_refused_before_anything_is_started(
    workspace: Workspace, start_nodes: StartNodes
):
    nodes = start_nodes(1, 1)
    more = overrides(workspace, "small", "trainer.num_ranks=4")
    run = CliRun(["train", GSPO, *more, "--ray-address", nodes.address])
    try:
        assert run.wait(RUN_S) == 1
    finally:
        run.close()
    assert "needs 4 CPUs for trainer ranks" in run.stderr
    assert nodes.left(*OURS) == []


@pytest.mark.full
def test_nodes_whose_own_folders_cannot_be_written_are_named_before_anything_is_started(
    workspace: Workspace, start_nodes: StartNodes
):
    nodes = start_nodes(1, 3)
    more = overrides(workspace, "folders", "resync.transport=delta", "resync.local_dir=/proc/nope")
    run = run_cli("train", GSPO, *more, "--ray-address", nodes.address, timeout_s=RUN_S)
    assert run.process.returncode == 1
    first, second = dict.fromkeys(nodes_of_slots(workspace.run_folder("folders")))
    reason = "No such file or directory"
    assert f"resync.local_dir: /proc/nope cannot be written on {first}: {reason}, on {second}: {reason}" in run.stderr
    assert nodes.left(*OURS) == []
