"""What a job does in which order, and what it says of nodes and steps that fail."""

import argparse
import io
import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from slimrl.config.load import load_recipe
from slimrl.launch import allreduce_probe, attempt, ray_node, recipe_nodes
from slimrl.launch import job as job_module
from slimrl.launch.attempt import MOST_UNOPENED, AttemptFolder, Preempted, Step, attempt_folder, wait_for
from slimrl.launch.job import Job
from slimrl.launch.options import add_options, check_rest, container_options
from slimrl.launch.ports import port_block
from slimrl.launch.preflight import compute_problems, judge_gpus
from slimrl.launch.reports import LaunchError, NodeReport, Selection, write_report
from slimrl.launch.slurm import PREEMPTED, Allocation, named_nodes
from slimrl.observability.progress import Progress
from slimrl.observability.run_folder import RunFolder
from slimrl.runtime import start, training
from slimrl.runtime.checks import start_check
from slimrl.runtime.state import CheckpointFolder, RunState

ROOT = Path(__file__).parents[2]


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return parser.parse_args(arguments)


class WatchedJob(Job):
    """Its steps are stand-ins: the driver ends with `driver_code`, or never; what happens is noted in `events`."""

    def __init__(self, folder: Path, driver_code: int | None, *arguments: str) -> None:
        folder.mkdir()
        self.events: list[str] = []
        self.driver_code = driver_code
        self.signal_in_preflight = False
        super().__init__(options(*arguments, "r.yaml"), Allocation(7, 0, ["a"], {"a": "a"}), AttemptFolder(folder))

    def _preflight(self) -> Selection:
        if self.signal_in_preflight:
            self._note(signal.SIGUSR1, None)
            raise Preempted([])
        return Selection(["a"], {})

    def _check_recipe(self, selection: Selection) -> None:
        return

    def _allreduce_probe(self):
        passed = SimpleNamespace(nodes=["a"], plan=dict, ray_address="a:1")
        return SimpleNamespace(run=lambda selection: passed)

    def _start_ray(self, nodes):
        return [self._start("ray", nodes, "")]

    def _start(self, name, nodes, module, *arguments):
        end = lambda: self.events.append(f"{name} is waited for")  # noqa: E731
        return SimpleNamespace(code=self.driver_code if name == "driver" else None, end=end)


@pytest.fixture
def watched(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(job_module, "POLL_S", 0.01)

    def make(driver_code: int | None, *arguments: str) -> WatchedJob:
        job = WatchedJob(tmp_path / "attempt", driver_code, *arguments)

        def requeue(job_id: int) -> None:
            assert job_id == 7
            said = job._folder.control.read_text().strip() if job._folder.control.exists() else "nothing"
            job.events.append(f"queued again after {said}")
            # As SLURM does.
            job._note(signal.SIGTERM, None)

        monkeypatch.setattr(job_module, "requeue", requeue)
        return job

    return make


def test_where_the_grace_is_over_the_job_is_queued_again_before_anything_is_waited_for(watched):
    job = watched(None, "--grace-s", "0.05")
    job._note(signal.SIGUSR1, None)
    assert job.run() == PREEMPTED
    assert job.events == ["queued again after end", "driver is waited for", "ray is waited for"]
    assert job._folder.control.read_text() == "end\n"
    # SIGTERM came meanwhile; without it this would take minutes.
    job.await_end()


def test_a_job_that_slurm_is_slow_to_end_waits_for_its_signal(watched, monkeypatch):
    """The signal that asked for a checkpoint is not the one that ends the job."""
    job = watched(PREEMPTED)
    job._note(signal.SIGUSR1, None)
    monkeypatch.setattr(job_module, "requeue", lambda job_id: None)
    assert job.run() == PREEMPTED
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            job._note(signal.SIGTERM, None)

    monkeypatch.setattr(job_module, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    job.await_end()
    assert len(waited) == 3


def test_the_token_of_rays_processes_is_for_the_users_eyes_alone(tmp_path: Path):
    mask = os.umask(0)
    try:
        tokens = [attempt.open_attempt(tmp_path, 7, number).token for number in (0, 1)]
    finally:
        os.umask(mask)
    assert [stat.S_IMODE(token.stat().st_mode) for token in tokens] == [0o600, 0o600]
    assert len({token.read_text() for token in tokens}) == 2
    assert all(len(token.read_text()) == 64 for token in tokens)


def test_where_the_checkpoint_is_whole_the_job_is_queued_again_before_rays_end(watched):
    job = watched(PREEMPTED)
    assert job.run() == PREEMPTED
    assert job.events == ["queued again after end", "driver is waited for", "ray is waited for"]


def test_two_attempts_without_a_new_checkpoint_end_the_job(watched, tmp_path: Path):
    logs = tmp_path / "logs"
    before, between = attempt_folder(logs, 7, 0), attempt_folder(logs, 7, 1)
    before.path.mkdir(parents=True)
    between.path.mkdir()
    job = watched(PREEMPTED, "--log-dir", str(logs))
    job._allocation = replace(job._allocation, attempt=2)
    refused = pytest.raises(
        LaunchError, match="attempt_000 and attempt wrote no new checkpoint, so the job is not requeued"
    )
    job._folder.checkpoints.write_text("4\n")
    # The attempt before made none, or went on from one and made none; the one between did not open the run.
    for steps in ("none\n", "4\n"):
        before.checkpoints.write_text(steps)
        with refused:
            job.run()
    assert not any("queued" in event for event in job.events)
    before.checkpoints.unlink()
    assert job.run() == PREEMPTED
    job._folder.checkpoints.write_text("4\n5\n")
    assert job.run() == PREEMPTED
    job._folder.checkpoints.write_text("5\n")
    before.checkpoints.write_text("4\n5\n")
    assert job.run() == PREEMPTED


def test_attempts_that_do_not_open_the_run_are_no_proof_but_do_not_go_on_for_ever(watched, tmp_path: Path, capsys):
    logs = tmp_path / "logs"
    first = attempt_folder(logs, 7, 0)
    first.path.mkdir(parents=True)
    first.checkpoints.write_text("none\n")
    job = watched(PREEMPTED, "--log-dir", str(logs))
    job._allocation = replace(job._allocation, attempt=MOST_UNOPENED - 1)
    assert job.run() == PREEMPTED
    assert f"did not open the run: {MOST_UNOPENED - 1}; after {MOST_UNOPENED} the job ends" in capsys.readouterr().out
    job._allocation = replace(job._allocation, attempt=MOST_UNOPENED)
    with pytest.raises(LaunchError, match=f"{MOST_UNOPENED} attempts in a row were ended before they opened the run"):
        job.run()


def test_what_another_command_saves_is_not_known_so_it_is_queued_again(watched):
    job = watched(PREEMPTED, "--command")
    job._allocation = replace(job._allocation, attempt=4)
    assert job.run() == PREEMPTED


def test_a_run_notes_the_checkpoint_that_it_goes_on_from_and_those_that_it_writes(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(start, "collect_provenance", lambda *about: {})
    monkeypatch.setattr(start, "log_to_file", lambda *about, **how: None)
    loaded = load_recipe(
        ROOT / "recipes" / "tiny_moe" / "gspo_calculator.yaml", [f"run.dir={tmp_path}", "run.name=demo"]
    )
    monkeypatch.setattr(start_check, "check_checkpoint_model", lambda checkpoint, recipe: None)
    notes = tmp_path / "checkpoints"
    with start.open_run(loaded, Progress(0), job="7", checkpoint_log=notes) as run:
        assert training.newest_state(run, loaded.recipe, Progress(0))[0] is None
    saved = CheckpointFolder(run.checkpoints)
    saved.finish(saved.begin(2), RunState(step=2), {})
    run.note_checkpoint(2)
    assert notes.read_text() == "none\n2\n"
    assert AttemptFolder(tmp_path).gained_checkpoint
    notes.unlink()
    with start.open_run(loaded, Progress(0), job="7", checkpoint_log=notes) as run:
        training.newest_state(run, loaded.recipe, Progress(0))
    assert notes.read_text() == "2\n"
    assert not AttemptFolder(tmp_path).gained_checkpoint


def test_a_signal_before_anything_runs_queues_the_job_again(watched):
    job = watched(0)
    job.signal_in_preflight = True
    assert job.run() == PREEMPTED
    assert job.events == ["queued again after nothing"]
    job.await_end()


class HangingProcess:
    """An srun that does not end before it is killed."""

    def __init__(self, events: list[str], then=lambda: None) -> None:
        self.events, self.then = events, then
        self.code: int | None = None

    def poll(self) -> int | None:
        self.then()
        return self.code

    def terminate(self) -> None:
        self.events.append("srun is told")

    def kill(self) -> None:
        self.events.append("srun is killed")
        self.code = -9


@pytest.mark.parametrize("stage", ["preflight", "all-reduce"])
def test_a_signal_while_a_node_hangs_queues_the_job_again_before_its_srun_is_ended(watched, monkeypatch, stage: str):
    job = watched(0, "--gpus-per-node", "0")
    process = HangingProcess(job.events, lambda: job._note(signal.SIGUSR1, None) if not job.events else None)
    hanging = lambda *arguments, **rest: Step(stage, ["a"], process, job._folder)  # noqa: E731
    monkeypatch.setattr(attempt, "END_TIMEOUT_S", 0.01)
    if stage == "preflight":
        monkeypatch.setattr(job_module, "start_alone", hanging)
        monkeypatch.setattr(WatchedJob, "_preflight", Job._preflight)
    else:
        job._reports = {}
        monkeypatch.setattr(allreduce_probe, "start_step", hanging)
        monkeypatch.setattr(WatchedJob, "_allreduce_probe", Job._allreduce_probe)
    assert job.run() == PREEMPTED
    assert job.events == ["queued again after nothing", "srun is told", "srun is killed"]


def test_a_signal_while_an_srun_is_ended_is_not_left_waiting():
    events: list[str] = []
    with pytest.raises(Preempted) as caught:
        wait_for([Step("preflight", ["a"], HangingProcess(events), AttemptFolder(Path()))], 0.0, lambda: bool(events))
    assert events == ["srun is told"]
    assert [step.name for step in caught.value.steps] == ["preflight"]


def test_a_command_that_saves_has_the_grace_for_it_and_is_asked_once(watched, monkeypatch, capsys):
    job = watched(None, "--grace-s", "100")
    said = []
    monkeypatch.setattr(job._folder.__class__, "say", lambda self, word: said.append(word))
    now = [50.0]

    def sleep(seconds: float) -> None:
        now[0] += 30
        if now[0] == 110:
            job._note(signal.SIGUSR1, None)

    monkeypatch.setattr(
        job_module, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: now[0], strftime=lambda f: f)
    )
    rays = [SimpleNamespace(code=None)]
    assert job._watch(rays, SimpleNamespace(code=None)) == PREEMPTED
    # Asked at 110 s, and waited for until more than 100 s are over.
    assert (now[0], said) == (230.0, ["preempt"])
    assert capsys.readouterr().out.endswith("no new checkpoint within 100 s\n")

    class Saves:
        @property
        def code(self) -> int | None:
            return PREEMPTED if now[0] >= 320 else None

    job._signal, now[0] = None, 50.0
    assert job._watch(rays, SimpleNamespace(code=0)) == 0
    now[0] = 230.0
    job._note(signal.SIGTERM, None)
    assert job._watch(rays, Saves()) == PREEMPTED
    assert (now[0], said) == (320.0, ["preempt"] * 2)
    assert "no new checkpoint" not in capsys.readouterr().out


def test_a_ray_that_ends_before_the_command_ends_the_job_with_its_own_words(watched):
    job = watched(None)
    dead = SimpleNamespace(code=1, failure=lambda: "ray ended with code 1")
    with pytest.raises(LaunchError, match="ray ended with code 1"):
        job._watch([dead], SimpleNamespace(code=None))
    assert job._watch([dead], SimpleNamespace(code=PREEMPTED)) == PREEMPTED


def test_with_spare_nodes_the_job_outlives_nodes_other_than_the_head(watched, monkeypatch, capsys):
    job = watched(None, "--spare-nodes", "1")
    alone = lambda folder, options, name, node, *given: (name, node, given)  # noqa: E731
    monkeypatch.setattr(job_module, "start_alone", alone)
    given = ("slimrl.launch.ray_node", f"--plan={job._folder.plan}", f"--control={job._folder.control}")
    assert Job._start_ray(job, ["a", "b"]) == [("ray", "a", given), ("ray", "b", given)]

    class Ray:
        def __init__(self, node: str, dies_at: int) -> None:
            self.nodes, self.dies_at = [node], dies_at

        @property
        def code(self) -> int | None:
            return 9 if now[0] >= self.dies_at else None

        def failure(self) -> str:
            return f"ray on {self.nodes[0]} ended with code 9"

    now = [0]
    sleep = lambda seconds: now.__setitem__(0, now[0] + 1)  # noqa: E731
    clock = SimpleNamespace(sleep=sleep, monotonic=lambda: now[0], strftime=lambda f: "T")
    monkeypatch.setattr(job_module, "time", clock)

    class Driver:
        def __init__(self, ends_with: int) -> None:
            self._ends_with = ends_with

        @property
        def code(self) -> int | None:
            return self._ends_with if now[0] >= 8 else None

        def failure(self) -> str:
            return "driver ended with code 3"

    assert job._watch([Ray("a", 99), Ray("b", 3), Ray("c", 5)], Driver(0)) == 0
    said = "T b is lost: ray on b ended with code 9\nT c is lost: ray on c ended with code 9\n"
    assert capsys.readouterr().out == said
    now[0] = 0
    with pytest.raises(LaunchError, match="ray on a ended with code 9"):
        job._watch([Ray("a", 4), Ray("b", 3)], Driver(0))
    # What ended before is not told again when the command fails.
    capsys.readouterr()
    now[0] = 0
    assert job._watch([Ray("a", 99), Ray("b", 3), Ray("c", 9)], Driver(3)) == 3
    assert capsys.readouterr().out == (
        "T b is lost: ray on b ended with code 9\nT driver ended with code 3\nT failed: ray on c ended with code 9\n"
    )


def test_of_a_command_that_fails_it_is_said_whether_ray_ended_with_it(watched, monkeypatch, capsys):
    job = watched(None)
    now = [0.0]

    class Ray:
        dies_s = 4.0

        @property
        def code(self) -> int | None:
            return 9 if now[0] >= self.dies_s else None

        def failure(self) -> str:
            return "ray ended with code 9"

    sleep = lambda seconds: now.__setitem__(0, now[0] + 1)  # noqa: E731
    monkeypatch.setattr(
        job_module, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: now[0], strftime=lambda f: "T")
    )
    driver = SimpleNamespace(code=3, failure=lambda: "driver ended with code 3")
    ray = Ray()
    assert job._watch([ray], driver) == 3
    assert capsys.readouterr().out == "T driver ended with code 3\nT failed: ray ended with code 9\n"
    assert now[0] == 4
    now[0], ray.dies_s = 0.0, 10**9
    assert job._watch([ray], driver) == 3
    assert capsys.readouterr().out == "T driver ended with code 3\n"
    assert now[0] == job_module.NOTICE_S


@pytest.mark.parametrize("late", [False, True])
def test_every_node_is_asked_by_itself_and_what_is_wrong_with_it_is_told(watched, monkeypatch, capsys, late):
    job = watched(0, "--gpus-per-node", "4", "--min-free-gib", "9.5", "--spares", "2", "--preflight-timeout-s", "30")
    nodes = ["a", "b", "c"]
    job._allocation = replace(job._allocation, nodes=nodes)
    asked = []

    def start_alone(folder, options, name, node, module, *arguments) -> Step:
        asked.append((name, node, options, module, arguments))
        folder.log(name, node).write_text(f"last of {node}\n")
        if node == "c":
            write_report(folder.path / "preflight", NodeReport("c", cores=5))
        if node == "a":
            write_report(folder.path / "preflight", NodeReport("a", ["it is full"]))
        return Step(name, [node], SimpleNamespace(poll=lambda: 0), folder)

    def wait(steps, timeout_s, stop):
        assert (timeout_s, stop) == (30.0, job._is_preempted)
        return [step for step in steps if not (late and step.nodes == ["b"])]

    monkeypatch.setattr(job_module, "start_alone", start_alone)
    monkeypatch.setattr(job_module, "wait_for", wait)
    selection = Job._preflight(job)
    missing = f"sent no report{' within 30 s' if late else ''}: last of b"
    assert selection == Selection(["c"], {"a": "it is full", "b": missing})
    assert [node for _, node, *_ in asked] == nodes
    (name, _, given, module, arguments) = asked[0]
    assert (name, given, module) == ("preflight", job._options, "slimrl.launch.preflight")
    assert arguments == (
        f"--folder={job._folder.path}", "--gpus=4", "--min-free-gib=9.5", f"--first-port={port_block(7).first}"
    )  # fmt: skip
    said = capsys.readouterr().out
    assert "preflight: left out a: it is full\n" in said
    assert f"preflight: left out b: {missing}\n" in said
    job._options.spares = 1
    with pytest.raises(LaunchError, match="1 of 3 nodes are good, 2 needed"):
        Job._preflight(job)


@pytest.fixture
def started(monkeypatch):
    """In place of srun: notes how it is started."""
    calls = []

    def start(command, *, stdin, stdout, stderr, start_new_session):
        calls.append((command, stdout.name))
        assert (stdin, stderr, start_new_session) == (subprocess.DEVNULL, stdout, True)
        return SimpleNamespace(poll=lambda: None)

    monkeypatch.setattr(subprocess, "Popen", start)
    return calls


def test_steps_have_logs_of_their_nodes_and_of_srun(tmp_path: Path, started):
    folder = AttemptFolder(tmp_path)
    contained = options("--container", "i", "--gpus-per-node", "4")
    step = attempt.start_step(folder, contained, "ray", ["a", "b"], "slimrl.launch.ray_node", "-x")
    (command, log) = started[0]
    assert log == str(tmp_path / "ray.srun.log")
    expected = {"--nodelist=a,b", "--nodes=2", f"--output={tmp_path}/ray.%N.log", "--gpus-per-node=4"}
    assert {*expected, "--kill-on-bad-exit=1", "--wait=0"} <= set(command)
    assert "--container-image=i" in command
    assert command[-4:] == ["python3", "-m", "slimrl.launch.ray_node", "-x"]
    assert (step.name, step.nodes, step.code) == ("ray", ["a", "b"], None)
    without = options("--gpus-per-node", "0", "--venv", "/v")
    attempt.start_step(folder, without, "sum", ["a", "b"], "x", stop_together=False)
    assert started[1][0][-3:] == ["/v/bin/python", "-m", "x"]
    assert "--kill-on-bad-exit=0" in started[1][0]
    assert not any(word.startswith("--gpus") for word in started[1][0])
    alone = attempt.start_alone(folder, options("--gpus-per-node", "2"), "preflight", "b", "x")
    (command, log) = started[2]
    assert log == str(tmp_path / "preflight.b.log")
    assert {"--nodelist=b", "--nodes=1", "--ntasks=1", "--gpus-per-node=2"} <= set(command)
    assert not any(word.startswith("--output") for word in command)
    assert (alone.name, alone.nodes) == ("preflight", ["b"])


def test_without_srun_the_job_fails(tmp_path: Path, monkeypatch):
    def absent(*arguments, **how):
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "Popen", absent)
    with pytest.raises(LaunchError, match="no srun on PATH"):
        attempt.start_step(AttemptFolder(tmp_path), options(), "ray", ["a"], "x")


def test_a_job_starts_its_programs_with_the_plan_and_the_control_file(watched, monkeypatch):
    job, calls = watched(0, "--gpus-per-node", "3"), []
    monkeypatch.setattr(job_module, "start_step", lambda *arguments, **how: calls.append((arguments, how)))
    Job._start(job, "driver", ["a"], "slimrl.launch.driver", "--", "train")
    ((folder, *given), how) = calls[0]
    assert folder == job._folder
    assert given == [
        job._options, "driver", ["a"], "slimrl.launch.driver",
        f"--plan={folder.plan}", f"--control={folder.control}", "--", "train",
    ]  # fmt: skip
    assert how == {}


def test_a_step_that_goes_on_is_given_time_before_its_srun_is_told(monkeypatch):
    events: list[str] = []
    monkeypatch.setattr(attempt, "END_TIMEOUT_S", 0.01)
    waits = []
    monkeypatch.setattr(attempt, "_await_end", lambda steps, timeout_s, stop: waits.append((len(steps), timeout_s)))
    Step("ray", ["a"], HangingProcess(events), AttemptFolder(Path())).end(5.0)
    assert events == ["srun is told", "srun is killed"]
    assert waits == [(1, 5.0), (1, 0.01), (1, 0.01)]


@pytest.mark.parametrize(
    ("arguments", "code", "failure", "exit_code", "said"),
    [
        (["r.yaml"], 0, None, 0, "job 7, attempt 2, nodes a, b\n"),
        (["r.yaml"], 3, None, 3, "job 7, attempt 2, nodes a, b\n"),
        (["r.yaml"], PREEMPTED, None, PREEMPTED, "its end is awaited\n"),
        (["r.yaml"], 0, LaunchError("node a died"), 1, "failed: node a died\n"),
        (["--spares", "2", "r.yaml"], 0, None, 1, "failed: --spares 2 and --spare-nodes 0 leave none of 2 nodes\n"),
        (["--spares", "1"], 0, None, 1, "failed: no recipe is given\n"),
    ],
)
def test_a_job_ends_with_the_commands_code_and_with_1_for_its_own_failures(
    tmp_path: Path, monkeypatch, capsys, arguments, code, failure, exit_code, said
):
    class StandIn:
        def __init__(self, options, allocation, folder) -> None:
            assert folder.path == attempt_folder(tmp_path / "logs", 7, 2).path
            assert folder.control.read_text() == "run\n"
            assert folder.canary.read_text().startswith("7 2 ")
            assert (folder.path.parent / "latest").resolve() == folder.path

        def run(self) -> int:
            if failure is not None:
                raise failure
            return code

        def await_end(self) -> None:
            print("its end is awaited")

    monkeypatch.chdir(tmp_path)
    Path("r.yaml").touch()
    monkeypatch.setattr(job_module, "this_allocation", lambda: Allocation(7, 2, ["a", "b"], {"a": "a", "b": "b"}))
    monkeypatch.setattr(job_module, "Job", StandIn)
    monkeypatch.setattr(sys, "argv", ["job", "--log-dir", "logs", *arguments])
    with pytest.raises(SystemExit) as ended:
        job_module.main()
    assert ended.value.code == exit_code
    assert capsys.readouterr().out.endswith(said)


def test_a_command_that_fails_is_not_queued_again(watched, monkeypatch):
    monkeypatch.setattr(WatchedJob, "_explain", lambda self, ray, driver: None)
    job = watched(3)
    assert job.run() == 3
    assert job.events == ["driver is waited for", "ray is waited for"]


def test_what_cannot_run_is_refused_before_the_first_step(tmp_path: Path):
    with pytest.raises(LaunchError, match="no recipe is given"):
        check_rest(options("--spares", "1"))
    with pytest.raises(LaunchError, match=r"recipe recipes/gpso\.yaml: no such file in "):
        check_rest(options("--spares", "1", "recipes/gpso.yaml", "--resume"))
    with pytest.raises(LaunchError, match="no command is given"):
        check_rest(options("--command"))
    recipe = tmp_path / "r.yaml"
    recipe.write_text("steps: 1\n")
    check_rest(options(str(recipe), "a.b=1"))
    check_rest(options("--command", "echo"))
    # In a container there may be more than here, but for the working folder, which is the same in both.
    check_rest(options("--container", "i", "/in/the/image/r.yaml"))
    with pytest.raises(LaunchError, match=r"recipe recipes/gpso\.yaml: no such file in "):
        check_rest(options("--container", "i", "recipes/gpso.yaml"))


@pytest.fixture
def recipe(tmp_path: Path) -> list[str]:
    """A recipe and its settings: 8 trainer ranks and 4 engines of 2 ranks, on GPUs of their own."""
    model = {"model_type": "qwen3_moe", "num_hidden_layers": 8, "num_attention_heads": 32, "num_key_value_heads": 4}
    model |= {"num_experts": 128, "moe_intermediate_size": 768, "intermediate_size": 6144}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(model))
    (tmp_path / "t.jsonl").touch()
    return [
        str(ROOT / "recipes" / "tiny_moe" / "gspo_calculator.yaml"),
        *(f"model.path={tmp_path / 'model'}", f"data.train={tmp_path / 't.jsonl'}"),
        *(f"data.eval.heldout={tmp_path / 't.jsonl'}", "trainer.num_ranks=8", "trainer.parallel.expert=8"),
        *("rollout.num_engines=4", "rollout.engine_tp=2", "resync.transport=p2p"),
    ]


NEEDED = "the run needs 8 GPUs for trainer ranks and 4 x 2 others for engines, each engine on one node"


@pytest.mark.parametrize(
    ("nodes", "arguments", "rest", "said"),
    [
        (1, [], [], f"{NEEDED}; there are GPUs on: n0 8. Nodes of 8 GPUs needed: 2."),
        (2, [], ["--resume"], ""),
        (3, [], [], "idle nodes: n2; the run needs 2 of 3 nodes"),
        (2, ["--sft"], ["sft.max_tokens=64"], "idle nodes: n1; the run needs 1 of 2 nodes"),
        (4, ["--gpus-per-node", "0", "--cores-per-node", "4"], [], ""),
        (3, ["--gpus-per-node", "0"], [], "there are cores on: n0 5, n1 5, n2 5. Nodes of 5 cores needed: 4."),
        (3, ["--spare-nodes", "1"], ["trainer.spare_nodes=1"], ""),
        (3, [], ["trainer.spare_nodes=1"], "trainer.spare_nodes: is 1, and the job's --spare-nodes 0. Give it"),
        (2, ["--spare-nodes", "1"], [], "trainer.spare_nodes: is 0, and the job's --spare-nodes 1. Give it"),
        (2, [], ["trainer.parallel.expert=3"], "trainer.parallel.expert: 3 does not divide the model's 128 experts."),
    ],
)
def test_nodes_are_compared_with_the_recipes_before_the_all_reduce(
    watched, recipe, monkeypatch, capsys, nodes, arguments, rest, said
):
    job = watched(0, *arguments)
    names = [f"n{index}" for index in range(nodes)]
    job._options.rest = [*recipe, *rest]
    job._reports = {name: SimpleNamespace(cores=5) for name in names}

    def start_alone(folder, options, name, node, module, *arguments) -> Step:
        """Runs the check in this process, its output in its log as srun leaves it."""
        assert (name, node, module) == ("recipe", "n0", "slimrl.launch.recipe_nodes")
        log, code = io.StringIO(), 0
        with monkeypatch.context() as patched, redirect_stdout(log):
            patched.setattr(sys, "argv", [module, *arguments])
            try:
                recipe_nodes.main()
            except SystemExit as ended:
                print(ended)
                code = 1
        folder.log(name, node).write_text(log.getvalue())
        return Step(name, [node], SimpleNamespace(poll=lambda: code), folder)

    monkeypatch.setattr(job_module, "start_alone", start_alone)
    monkeypatch.setattr(WatchedJob, "_preflight", lambda self: Selection(names, {}))
    monkeypatch.setattr(WatchedJob, "_check_recipe", Job._check_recipe)
    if said.startswith("idle nodes") or not said:
        assert job.run() == 0
        printed = capsys.readouterr().out
        assert said in printed
        assert ("idle nodes" in printed) == bool(said)
    else:
        with pytest.raises(LaunchError, match=re.escape(said)):
            job.run()
        assert job.events == []


def test_a_command_that_is_no_recipe_is_not_compared(watched, monkeypatch):
    job = watched(0, "--command")
    monkeypatch.setattr(WatchedJob, "_check_recipe", Job._check_recipe)
    assert job.run() == 0


def test_a_container_sees_logs_that_lie_elsewhere(tmp_path: Path):
    here = Path.cwd()
    base = f"--container-mounts={here}:{here},/tmp:/tmp"
    assert container_options(options("--container", "i", "r.yaml"))[1] == base
    elsewhere = options("--container", "i", "--log-dir", "/scratch/logs", "--container-mounts", "/m:/m", "r.yaml")
    assert container_options(elsewhere)[1] == f"{base},/scratch/logs:/scratch/logs,/m:/m"
    assert container_options(options("--log-dir", "/scratch/logs", "r.yaml")) == []


def test_rays_sockets_fit_whatever_a_node_is_called():
    folder = ray_node.make_temp_dir(9_999_999_999)
    try:
        # The largest process id of Linux.
        socket = folder / "ray" / "session_2026-11-21_13-49-29_123456_4194304" / "sockets" / "plasma_store"
        assert len(str(socket).encode()) <= 107
        assert (folder / "tmp").is_dir()
        # Ray lets everybody write to its own folder.
        assert folder.stat().st_mode & 0o777 == 0o700
    finally:
        (folder / "tmp").rmdir()
        (folder / "ray").rmdir()
        folder.rmdir()


def test_srun_names_nodes_by_whole_words_and_in_brackets():
    nodes = [*(f"node{index}" for index in range(1, 21)), "gpu-001", "gpu-010", "x1y07", "login.a"]

    def named(text: str) -> list[str]:
        return named_nodes(text, nodes)

    assert named("srun: error: node12: task 3: Killed") == ["node12"]
    assert named("srun: error: node[12-13]: tasks 0-1: Exited with exit code 1") == ["node12", "node13"]
    assert named("srun: error: node[1,9-10],gpu-[001-009]: tasks 0-3: Killed") == [
        "node1",
        "node9",
        "node10",
        "gpu-001",
    ]
    assert named("Node failure on gpu-010.") == ["gpu-010"]
    assert named("x[1-2]y[06-07]: tasks 0-3") == ["x1y07"]
    assert named("gpu-[1-10] node[01-02] node anode1 node1x") == []
    assert named("login.a: node[1-99999999999]x node[2-") == ["login.a"]


def test_a_failed_step_shows_the_log_of_the_node_that_srun_names(tmp_path: Path):
    nodes = ["node1", "node12", "node13"]
    for node in nodes:
        (tmp_path / f"ray.{node}.log").write_text(f"last of {node}\n")
    (tmp_path / "ray.srun.log").write_text("srun: error: node[12-13]: tasks 1-2: Killed\n")
    process = subprocess.Popen(["false"])
    process.wait()
    said = Step("ray", nodes, process, AttemptFolder(tmp_path)).failure()
    assert said.startswith("ray ended with code 1\n  srun: error: node[12-13]: tasks 1-2: Killed\n")
    assert "last of node12" in said
    assert "last of node13" in said
    assert "last of node1\n" not in said


def test_of_a_step_of_many_nodes_five_are_shown_with_their_last_five_lines(tmp_path: Path):
    nodes = [f"n{index}" for index in range(1, 8)]
    for node in nodes:
        (tmp_path / f"ray.{node}.log").write_text("".join(f"{node} line {number}\n" for number in range(8)))
    (tmp_path / "ray.srun.log").write_text("".join(f"srun {number}\n" for number in range(7)) + "n[1-7]: Killed\n")
    step = Step("ray", nodes, SimpleNamespace(poll=lambda: 137), AttemptFolder(tmp_path))
    lines = step.failure().splitlines()
    assert lines[:6] == ["ray ended with code 137", *(f"  srun {n}" for n in (3, 4, 5, 6)), "  n[1-7]: Killed"]
    assert [line for line in lines[6:] if line.endswith(":")] == [f"  {tmp_path}/ray.{node}.log:" for node in nodes[:5]]
    assert lines[7:12] == [f"      n1 line {number}" for number in (3, 4, 5, 6, 7)]
    assert len(lines) == 6 + 5 * 6
    # Where srun names nobody it is the first.
    (tmp_path / "ray.srun.log").unlink()
    assert step.failure().splitlines()[1] == f"  {tmp_path}/ray.n1.log:"
    assert "n2" not in step.failure()


def test_of_a_node_without_a_report_the_last_that_it_printed_is_told(tmp_path: Path):
    lines = ["Traceback", "ModuleNotFoundError: No module named 'psutil'", "", "srun: error: a: task 0: Exited"]
    (tmp_path / "preflight.a.log").write_text("\n".join(lines))
    step = Step("preflight", ["a"], None, AttemptFolder(tmp_path))
    assert step.last_words("a") == "ModuleNotFoundError: No module named 'psutil'; srun: error: a: task 0: Exited"
    assert step.last_words("b") == ""


def test_a_build_of_torch_without_cuda_and_an_odd_answer_of_nvidia_smi_are_problems_of_the_node():
    import torch

    if torch.version.cuda is None:
        assert compute_problems(2) == [f"GPU {index}: Torch not compiled with CUDA enabled" for index in range(2)]
    found, driver, problems = judge_gpus("0, 4, 0, 580.65\nUnable to determine the device handle\n", 2)
    assert (found, driver) == (2, "580.65")
    assert problems == ["nvidia-smi says of a GPU: Unable to determine the device handle"]


def test_later_attempts_of_a_job_continue_its_own_run_and_treat_others_as_the_first_did(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(start, "collect_provenance", lambda *about: {})
    monkeypatch.setattr(start, "log_to_file", lambda *about, **how: None)
    recipe = ROOT / "recipes" / "tiny_moe" / "gspo_calculator.yaml"
    loaded = load_recipe(recipe, [f"run.dir={tmp_path}", "run.name=demo"])

    def opened(**how) -> RunFolder:
        with start.open_run(loaded, Progress(0), **how) as run:
            return run

    foreign = opened()
    (foreign.checkpoints / "step_000009").mkdir()
    for _ in range(2):
        with pytest.raises(ValueError, match="demo exists"):
            opened(job="7")
    # An attempt that was ended before it came this far has left the other's run as it was; the next removes it.
    mine = opened(overwrite=True, job="7")
    assert not any(mine.checkpoints.iterdir())
    (mine.checkpoints / "step_000002").mkdir()
    opened(resume=True, job="8")
    again = opened(overwrite=True, job="7")
    assert [path.name for path in again.checkpoints.iterdir()] == ["step_000002"]
    assert again.jobs.read_text() == "7\n8\n"
    (mine.checkpoints / "step_000002").rmdir()
    anew = opened(job="7")
    assert anew.jobs.read_text() == "7\n"
    assert (tmp_path / "demo.attempt_000" / "jobs").is_file()
