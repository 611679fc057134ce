"""However a run ends, none of its processes is left, and the user reads the cause once."""

import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from cli_runs import RECIPES, CliRun, Workspace, make_workspace, num_logged_steps

from slimrl.observability.run_folder import RunFolder
from slimrl.resync.ipc.shared_buffer import SHARED_MEMORY_DIR

pytestmark = [pytest.mark.integration, pytest.mark.timeout(500)]

START_S = 300.0
"""Until the first step's metrics are there, on a loaded machine."""
END_S = 60.0
"""From a signal or a failure to the end of the command."""

Start = Callable[..., tuple[CliRun, RunFolder]]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return make_workspace(tmp_path_factory.mktemp("run_ends"))


@pytest.fixture
def start(workspace: Workspace, request: pytest.FixtureRequest) -> Iterator[Start]:
    """Starts a long training run, `ranks` trainer ranks and `engines` engines, of which nothing outlives the test."""
    runs = []
    name = re.sub(r"\W+", "-", request.node.name)

    def begin(*settings: str, ranks: int = 1, engines: int = 1, long_rollout: bool = False) -> tuple[CliRun, RunFolder]:
        overrides = workspace.overrides(
            f"run.name={name}",
            "steps=1000",
            f"trainer.num_ranks={ranks}",
            f"trainer.parallel.expert={ranks}",
            f"rollout.num_engines={engines}",
            *settings,
        )
        if long_rollout:
            # 128 turns of 600 tokens: several seconds on any machine.
            overrides += [
                "rollout.prompts_per_step=32",
                "rollout.sampling.max_new_tokens=600",
                "rollout.sampling.ignore_end_of_turn=true",
                "rollout.max_trajectory_tokens=1000",
            ]
        runs.append(CliRun(["train", str(RECIPES / "gspo_calculator.yaml"), *overrides]))
        return runs[-1], workspace.run_folder(name)

    yield begin
    for run in runs:
        run.close()


def assert_ended(run: CliRun, code: int, *texts: str) -> None:
    """The exit code, an error of a few lines with these texts, each once, and nothing left."""
    assert run.wait(END_S) == code, run.stderr
    assert run.left() == []
    for text in texts:
        assert run.stderr.count(text) == 1, run.stderr
    assert "Traceback" not in run.stderr
    assert len([line for line in run.stderr.splitlines() if not line.startswith("logs: ")]) <= 3, run.stderr
    assert segments_of(run) == []


def segments_of(run: CliRun) -> list[str]:
    """Shared memory of the run's processes."""
    pids = {str(member.pid) for member in run.family}
    return [path.name for path in SHARED_MEMORY_DIR.glob("slimrl-*") if path.name.split("-")[-2] in pids]


def first_step(run: CliRun, folder: RunFolder) -> None:
    run.wait_until(lambda: num_logged_steps(folder) >= 2, START_S)


def in_rollout(run: CliRun, folder: RunFolder) -> None:
    """The engines have their weights; a long rollout is under way from then on."""
    run.wait_until(lambda: num_logged_steps(folder) >= 1, START_S)


def log_path(folder: RunFolder, name: str) -> Path:
    path = folder.log_file(name)
    assert path.is_file()
    return path


@pytest.mark.full
def test_ctrl_c_in_a_rollout_leaves_nothing(start: Start):
    run, folder = start(engines=2, long_rollout=True)
    in_rollout(run, folder)
    run.interrupt_as_terminal()
    assert_ended(run, 1, "ended by SIGINT", f"{folder.path} holds no checkpoint yet")


@pytest.mark.full
@pytest.mark.parametrize("moment", ["ray", "actors", "engines"])
def test_ctrl_c_while_starting_leaves_nothing(start: Start, moment: str):
    run, _ = start()
    signs = {"ray": "gcs_server", "actors": "ray::TrainerActor", "engines": "slimrl.engines.plugin.launch"}
    run.wait_until(lambda: bool(run.members(signs[moment])), START_S)
    run.interrupt_as_terminal()
    assert_ended(run, 1, "ended by SIGINT")


@pytest.mark.full
def test_sigterm_between_steps_leaves_nothing(start: Start):
    run, folder = start(ranks=2)
    first_step(run, folder)
    run.process.send_signal(signal.SIGTERM)
    assert_ended(run, 1, "ended by SIGTERM")


ASYNC = (
    "rollout.mode=async", "algorithm.correction.level=token", "rollout.health_timeout_s=5", "resync.timeout_s=15",
    "reward.function=toy_reward:low_tokens_of_any_version",
)  # fmt: skip


def wait_for_restart(run: CliRun, folder: RunFolder) -> None:
    log = folder.log_file("driver")
    run.wait_until(lambda: "restarted while the others go on" in log.read_text(), START_S)


@pytest.mark.full
def test_ctrl_c_while_an_engine_hangs_leaves_nothing(start: Start):
    run, folder = start(*ASYNC, engines=2)
    first_step(run, folder)
    run.signal_server(1, signal.SIGSTOP)
    run.interrupt_as_terminal()
    assert_ended(run, 1, "ended by SIGINT")


@pytest.mark.full
def test_sigterm_while_an_engine_restarts_leaves_nothing(start: Start):
    run, folder = start(*ASYNC, engines=2)
    first_step(run, folder)
    run.kill_server(1)
    wait_for_restart(run, folder)
    run.process.send_signal(signal.SIGTERM)
    assert_ended(run, 1, "ended by SIGTERM")


@pytest.mark.full
def test_a_preempted_run_whose_only_engine_restarts_saves_itself_and_leaves_nothing(start: Start):
    run, folder = start(*ASYNC)
    first_step(run, folder)
    run.kill_server(0)
    wait_for_restart(run, folder)
    run.process.send_signal(signal.SIGUSR1)
    assert run.wait(START_S) == 75, run.stderr
    assert run.left() == []
    assert segments_of(run) == []
    assert folder.has_checkpoint


@pytest.mark.full
def test_a_killed_trainer_rank_is_named(start: Start):
    run, folder = start("run.max_restarts=0", ranks=2)
    first_step(run, folder)
    victim = run.members("ray::TrainerActor")[-1]
    rank = rank_of(victim)
    victim.send_signal(signal.SIGKILL)
    assert_ended(run, 1, f"trainer {rank}: its process died", str(log_path(folder, f"trainer_{rank}")))


@pytest.mark.full
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_killed_engine_is_named_where_no_other_takes_its_sessions(start: Start, deterministic: bool):
    settings = ["deterministic=true"] if deterministic else []
    run, folder = start(*settings, engines=1 + deterministic, long_rollout=True)
    in_rollout(run, folder)
    run.kill_server(0)
    assert_ended(run, 1, "engine 0 was ended by SIGKILL", str(log_path(folder, "engine_0")))


@pytest.mark.full
def test_a_killed_engine_actor_is_named_and_takes_its_server_along(start: Start):
    run, folder = start(long_rollout=True)
    in_rollout(run, folder)
    run.members("ray::EngineActor")[0].send_signal(signal.SIGKILL)
    assert_ended(run, 1, "engine 0: its process died", str(log_path(folder, "engine_0_actor")))


@pytest.mark.full
def test_a_killed_driver_takes_everything_along(start: Start):
    run, folder = start(ranks=2, engines=2)
    first_step(run, folder)
    run.process.kill()
    assert run.wait(END_S) == -signal.SIGKILL
    assert run.left(30.0) == []
    assert segments_of(run) == []


def rank_of(trainer: psutil.Process) -> int:
    """By the log that it writes to."""
    log = Path(f"/proc/{trainer.pid}/fd/2").resolve()
    return int(log.stem.removeprefix("trainer_"))
