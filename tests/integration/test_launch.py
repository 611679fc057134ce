"""Jobs of several nodes, through slimrl's own scripts and a SLURM that runs on this machine."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from cli_runs import RECIPES, make_workspace, num_logged_steps
from fake_cluster import NO_GPU, ROOT, FakeJob, sbatch_command

from slimrl.launch.ports import port_block
from slimrl.observability.metrics import read_metrics

pytestmark = [pytest.mark.integration, pytest.mark.timeout(280)]

TRAIN = ROOT / "launch" / "slurm" / "train.sbatch"
RAY = ROOT / "launch" / "slurm" / "ray.sbatch"

SAY_NODES = (
    "import os, ray; a = os.environ['SLIMRL_RAY_ADDRESS']; ray.init(a, log_to_driver=False); "
    "n = sorted(x['NodeName'] for x in ray.nodes() if x['Alive']); print('RAY', a.split(':')[1], *n)"
)

LONG_NAME = "node2-" + "x" * 54

SAVE_ONCE = """
import pathlib, signal, sys, time
saved, ready = map(pathlib.Path, sys.argv[1:])
if saved.exists():
    sys.exit(0)

def save(*_):
    saved.write_text("step 3")
    sys.exit(75)

signal.signal(signal.SIGUSR1, save)
ready.write_text("")
time.sleep(200)
"""
"""What `slimrl train` does, as far as a job sees it."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator:
    jobs = []

    def start_job(nodes: int, script: Path, *arguments: str, **about_nodes):
        state = tmp_path / f"job_{len(jobs)}"
        jobs.append(FakeJob(state, sbatch_command(state, nodes, script, *arguments), **about_nodes))
        return jobs[-1]

    yield start_job
    for job in jobs:
        job.close()


def other_version(tmp_path: Path, package: str, version: str) -> dict[str, str]:
    """Environment of a node on which another version of a package is installed."""
    folder = tmp_path / "other" / f"{package}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    return {"PYTHONPATH": os.pathsep.join([str(folder.parent), str(Path(__file__).parent)])}


def test_a_part_of_a_job_ends_with_all_its_descendants_when_the_job_says_so(tmp_path: Path):
    control, pids = tmp_path / "control", tmp_path / "pids"
    control.write_text("run\n")
    # A grandchild in a session of its own, which ignores SIGTERM.
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(100)"
    parent = (
        "import pathlib, subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {stubborn!r}], start_new_session=True)\n"
        f"pathlib.Path({str(pids)!r}).write_text(str(child.pid))\ntime.sleep(100)"
    )
    part = (
        "import sys, pathlib; from slimrl.launch import control\n"
        f"command, file = [sys.executable, '-c', {parent!r}], pathlib.Path({str(control)!r})\n"
        "sys.exit(control.run_under_control(command, file, preemptible=False, end_timeout_s=1.0))"
    )
    process = subprocess.Popen([sys.executable, "-c", part], cwd=ROOT)
    try:
        deadline = time.monotonic() + 30
        while not pids.exists() or not pids.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(1.5)
        # Meant for others: it would end this one.
        control.write_text("preempt\n")
        time.sleep(1.5)
        assert process.poll() is None
        control.write_text("end\n")
        assert process.wait(20) == 0
        # Where nobody waits for orphans a dead one stays as a zombie.
        pid = int(pids.read_text())
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    finally:
        process.kill()


def test_a_bad_node_is_named_and_a_spare_takes_its_place(start, tmp_path: Path):
    faults = {"node1": other_version(tmp_path, "safetensors", "0.0.1")}
    refused = start(2, RAY, sys.executable, "-c", SAY_NODES, faults=faults)
    assert refused.wait(90) == 1, refused.everything()
    assert "1 of 2 nodes are good, 2 needed (0 spare)" in refused.output
    assert "node1: safetensors is 0.0.1, on most nodes " in refused.output
    assert not list(refused.logs.glob("*/attempt_000/ray*"))

    names = ["node0", "node1", LONG_NAME]
    job = start(3, RAY, "--spares", "1", sys.executable, "-c", SAY_NODES, faults=faults, names=names)
    assert job.wait(120) == 0, job.everything()
    assert "left out node1: safetensors is 0.0.1" in job.output
    latest = job.logs / str(job.job_id) / "latest"
    said = (latest / "driver.node0.log").read_text()
    assert f"RAY {port_block(job.job_id).port('gcs')} node0 {LONG_NAME}" in said, job.everything()
    assert latest.readlink() == Path("attempt_000")
    assert job.temp_dirs() == []
    assert not job.left(), job.left(0)


def test_what_cannot_run_is_refused_before_the_first_step(start):
    job = start(2, TRAIN, "recipes/no_such.yaml")
    assert job.wait(30) == 1, job.everything()
    assert "failed: recipe recipes/no_such.yaml: no such file in " in job.output
    assert not list(job.logs.glob("*/attempt_000"))


def test_a_job_with_fewer_nodes_than_its_recipe_needs_ends_before_they_meet(start, tmp_path: Path):
    settings = make_workspace(tmp_path / "work").overrides("run.name=few")
    job = start(1, TRAIN, "--cores-per-node", "1", str(RECIPES / "gspo_calculator.yaml"), *settings)
    assert job.wait(90) == 1, job.everything()
    assert "there are cores on: node0 1. Nodes of 1 cores needed: 2." in job.output, job.everything()
    assert not list(job.logs.glob("*/attempt_000/allreduce*"))
    assert not job.left(), job.left(0)


def test_a_node_without_a_report_is_named_with_the_last_that_it_printed(start):
    job = start(2, RAY, "true", faults={"node1": {"PYTHONHOME": "/nowhere"}})
    assert job.wait(60) == 1, job.everything()
    assert re.search(r"node1: sent no report: .*; srun: error: node1: task 0: Exited with exit code 1", job.output)


def test_a_job_that_is_signalled_in_the_preflight_is_queued_again_and_a_cancelled_one_is_not(start, tmp_path: Path):
    slow = tmp_path / "slow" / "sitecustomize.py"
    slow.parent.mkdir()
    slow.write_text("import time; time.sleep(60)")
    job = start(1, RAY, "true", faults={"node0": {"PYTHONPATH": str(slow.parent)}})
    job.wait_until(lambda: list(job.state.glob("*.node0.pid")), 30)
    job.signal(signal.SIGUSR1)
    job.wait_until(lambda: "attempt 1, nodes node0" in job.output, 60)
    assert job.output.index("SIGUSR1: the command has not started yet") < job.output.index("requeued")
    job.cancel()
    assert job.wait(60) == 1, job.everything()
    assert "failed: the job is CANCELLED, so it is not requeued" in job.output
    assert not job.left(), job.left(0)


@pytest.mark.full
def test_a_signal_before_the_time_limit_saves_and_queues_the_job_again(start, tmp_path: Path):
    saved, ready = tmp_path / "saved", tmp_path / "ready"
    job = start(1, RAY, sys.executable, "-c", SAVE_ONCE, str(saved), str(ready))
    job.wait_until(ready.exists, 100)
    job.signal(signal.SIGUSR1)
    assert job.wait(120) == 0, job.everything()
    assert saved.read_text() == "step 3"
    assert job.output.index("SIGUSR1: asking for a checkpoint") < job.output.index("requeued")
    assert "attempt 1, nodes node0" in job.output
    logs = job.logs / str(job.job_id)
    # Ray was not told to save: it would have died of that.
    assert "Ray's processes have ended" not in (logs / "attempt_000" / "ray.node0.log").read_text()
    assert sorted(path.name for path in logs.iterdir()) == ["attempt_000", "attempt_001", "latest"]
    assert (logs / "latest").readlink() == Path("attempt_001")
    assert not job.left(), job.left(0)


@pytest.mark.full
def test_a_job_that_gets_sigterm_and_saves_nothing_within_the_grace_is_queued_again(start, tmp_path: Path):
    saved, ready = tmp_path / "saved", tmp_path / "ready"
    deaf = SAVE_ONCE.replace("save)", "lambda *_: saved.write_text('never'))")
    job = start(1, RAY, "--grace-s", "3", sys.executable, "-c", deaf, str(saved), str(ready))
    job.wait_until(ready.exists, 100)
    job.signal(signal.SIGTERM)
    # The second attempt ends at once, since the file is there.
    assert job.wait(120) == 0, job.everything()
    assert "SIGTERM: asking for a checkpoint" in job.output
    assert job.output.index("no new checkpoint within 3 s") < job.output.index("requeued")
    assert "attempt 1, nodes node0" in job.output
    assert not job.left(), job.left(0)
    assert job.temp_dirs() == []


@pytest.mark.full
def test_a_submitted_recipe_runs_as_given_and_a_cancelled_job_is_not_queued_again(tmp_path: Path):
    workspace = make_workspace(tmp_path / "my work")
    tools = "agent.tools=[slimrl.agent.calculator:calculator]"
    settings = workspace.overrides("run.name=cancelled", tools)
    state, folder = tmp_path / "job", workspace.run_folder("cancelled")
    asked = [*("--nodes", "1", "--cores-per-node", "2", "--log-dir", str(state / "logs")), *NO_GPU]
    submission = [sys.executable, "-m", "slimrl.cli", "launch", "slurm", str(RECIPES / "gspo_calculator.yaml")]
    job = FakeJob(state, [*submission, *settings, *asked])
    try:
        assert job.wait(120) == 0, job.everything()
        job.adopt()
        assert f"Submitted batch job {job.job_id}" in job.output
        job.wait_until(folder.config.exists, 150)
        assert folder.jobs.read_text() == f"{job.job_id}\n"
        job.cancel()
        job.wait_until(lambda: not job.left(0), 60)
        assert "requeued" not in job.output.replace("is not requeued", ""), job.everything()
        assert (state / "state").read_text() == "CANCELLED"
        assert not (state / "logs" / str(job.job_id) / "attempt_001").exists()
        assert job.temp_dirs() == []
    finally:
        job.close()


@pytest.mark.full
def test_a_node_that_dies_ends_the_job_at_once_and_is_named(start, tmp_path: Path):
    ready = tmp_path / "ready"
    job = start(2, RAY, sys.executable, "-c", SAVE_ONCE, str(tmp_path / "saved"), str(ready))
    job.wait_until(ready.exists, 100)
    job.kill_node("node1")
    assert job.wait(60) == 1, job.everything()
    assert "failed: ray ended with code" in job.output
    assert "srun: error: node1: task 1: Killed" in job.output
    assert "requeued" not in job.output
    assert not job.left(), job.left(0)
    # The dead node could not remove its own.
    assert len(job.temp_dirs()) == 1


@pytest.mark.full
def test_a_run_on_two_nodes_that_is_preempted_continues_at_the_step_after_its_checkpoint(start, tmp_path: Path):
    workspace = make_workspace(tmp_path / "work")
    settings = workspace.overrides("run.name=two_nodes", "deterministic=true", "steps=4", "checkpoint.every_steps=0")
    folder = workspace.run_folder("two_nodes")
    # With one core of each, a trainer rank and an engine are on either.
    job = start(2, TRAIN, "--cores-per-node", "1", str(RECIPES / "gspo_calculator.yaml"), *settings)
    # Step 0 and the first two.
    job.wait_until(lambda: num_logged_steps(folder) >= 2, 120)
    job.signal(signal.SIGUSR1)
    assert job.wait(150) == 0, job.everything()
    assert "requeued" in job.output
    second = (job.logs / str(job.job_id) / "attempt_001" / "driver.node0.log").read_text()
    found = re.search(r"continuing after step (\d) of 4", second)
    assert found, job.everything()
    assert 1 <= int(found.group(1)) < 4
    attempts = [job.logs / str(job.job_id) / f"attempt_00{number}" / "checkpoints" for number in (0, 1)]
    assert [file.read_text().split() for file in attempts] == [["none", found.group(1)], [found.group(1), "4"]]
    assert [line["step"] for line in read_metrics(folder.metrics)] == [0, 1, 2, 3, 4]
    assert folder.export.is_dir()
    assert not job.left(), job.left(0)


@pytest.mark.full
@pytest.mark.timeout(500)
def test_a_job_with_a_spare_node_outlives_a_node_of_its_ranks(start, tmp_path: Path):
    workspace = make_workspace(tmp_path / "work")
    folder = workspace.run_folder("outlives")
    settings = [
        "run.name=outlives", f"run.dir={tmp_path / 'work' / 'runs'}", f"model.path={tmp_path / 'work' / 'model'}",
        f"data.train={tmp_path / 'work' / 'data' / 'sft.jsonl'}", "tracking.wandb=disabled", "steps=300",
        "trainer.optimizer.warmup_updates=2", "checkpoint.every_steps=20", "trainer.spare_nodes=1",
    ]  # fmt: skip
    # With one core of each, the two ranks are on the first two of three.
    given = ("--cores-per-node", "1", "--spare-nodes", "1", "--sft", str(RECIPES / "sft.yaml"), *settings)
    job = start(3, TRAIN, *given)
    job.wait_until(lambda: num_logged_steps(folder) >= 5, 150)
    job.kill_node("node1")
    assert job.wait(250) == 0, job.everything()
    assert "node1 is lost: ray ended with code" in job.output
    log = folder.log_file("driver").read_text()
    (spare,) = re.findall(r"spare_nodes: (\S+) is kept free", log)
    assert re.findall(r"ranks of \S+ start on (\S+)", log) == [spare]
    assert [line["step"] for line in read_metrics(folder.metrics)] == list(range(1, 301))
    assert folder.export.is_dir()
    assert not job.left(), job.left(0)


@pytest.mark.full
def test_a_node_that_dies_while_a_run_trains_ends_it_within_a_minute(start, tmp_path: Path):
    workspace = make_workspace(tmp_path / "work")
    settings = workspace.overrides("run.name=dies", "steps=50", "checkpoint.every_steps=1")
    folder = workspace.run_folder("dies")
    # With one core of each, a trainer rank and an engine are on either.
    job = start(2, TRAIN, "--cores-per-node", "1", str(RECIPES / "gspo_calculator.yaml"), *settings)
    job.wait_until(lambda: num_logged_steps(folder) >= 2, 120)
    job.kill_node("node1")
    assert job.wait(90) == 1, job.everything()
    assert "node1" in job.output
    assert not job.left(), job.left(0)
