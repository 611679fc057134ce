"""Symbolic comparison in processes of its own: right under load, bounded in CPU time, and gone with the run."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from slimrl.base.answering_process import OutOfCpuTime, ProcessFailed
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Status, Trajectory
from slimrl.rewards.comparers import Comparers
from slimrl.rewards.limited_processes import MEMORY_BYTES
from slimrl.rewards.math import boxed_equivalent
from slimrl.rewards.scoring import score

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

SLOW = ("9^{9^{9}}", "\\sqrt{8}")
"""A comparison that no machine finishes in seconds."""
WAIT_S = 120.0


@pytest.fixture
def comparers() -> Iterator[Comparers]:
    """At most two, whose comparisons may take less CPU time than their start does."""
    made = Comparers(max_processes=2, cpu_limit_s=1)
    yield made
    made.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def score_right_answers(number: int) -> list[float]:
    """The rewards of so many answers, each of which is right, and asked for at once."""
    trajectories = [
        Trajectory(
            group_id="g",
            trajectory_id=str(i),
            segments=[],
            status=Status.completed,
            messages=[{"role": "assistant", "content": f"\\boxed{{(x+{i})^2}}"}],
        )
        for i in range(2, number + 2)
    ]

    async def score_all() -> None:
        labels = (f"x^2+{2 * i}x+{i * i}" for i in range(2, number + 2))
        prompts = [Prompt(prompt_id="g", messages=[], label=label) for label in labels]
        jobs = (score(t, p, boxed_equivalent, WAIT_S) for t, p in zip(trajectories, prompts, strict=True))
        await asyncio.gather(*jobs)

    asyncio.run(score_all())
    return [trajectory.reward for trajectory in trajectories]


def test_a_container_with_another_slimrl_compares_as_the_driver_does(comparers, tmp_path: Path, monkeypatch):
    (tmp_path / "slimrl").mkdir()
    (tmp_path / "slimrl" / "__init__.py").write_text("raise ImportError('the one of the container')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert comparers.equivalent("2\\sqrt{2}", "\\sqrt{8}")


def test_right_answers_are_right_in_a_cold_process_on_a_loaded_machine():
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        # One that is stuck says where before its time is over.
        script = (
            f"import faulthandler; faulthandler.dump_traceback_later({WAIT_S - 10}, exit=True)\n"
            "from test_symbolic_rewards import score_right_answers; print(sum(score_right_answers(48)))"
        )
        path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
        scored = subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )
    finally:
        for burner in burners:
            burner.kill()
            burner.wait(10)
    assert (scored.stdout, scored.stderr) == ("48.0\n", "")


def test_a_comparison_above_its_cpu_time_ends_alone(comparers: Comparers, threads: ThreadPoolExecutor):
    slow = threads.submit(comparers.equivalent, *SLOW)
    others = [threads.submit(comparers.equivalent, f"x+{i}x", f"{i + 1}x") for i in range(2, 10)]
    assert isinstance(slow.exception(WAIT_S), OutOfCpuTime)
    assert [other.result(WAIT_S) for other in others] == [True] * 8
    assert comparers.equivalent("\\sqrt{7}", "\\sqrt{8}") is False
    assert len(comparers.pids) <= 2


def test_a_process_that_was_killed_is_replaced(threads: ThreadPoolExecutor):
    comparers = Comparers(max_processes=1, cpu_limit_s=60)
    try:
        assert comparers.equivalent("x+x", "2x")
        (idle,) = comparers.pids
        os.kill(idle, signal.SIGKILL)
        wait_until(lambda: not comparers.pids)
        assert comparers.equivalent("x+x", "2x")
        (busy,) = comparers.pids
        slow = threads.submit(comparers.equivalent, *SLOW)
        used = sum(psutil.Process(busy).cpu_times()[:2])
        wait_until(lambda: sum(psutil.Process(busy).cpu_times()[:2]) > used + 0.5)
        os.kill(busy, signal.SIGKILL)
        assert str(slow.exception(WAIT_S)) == "the process that compares answers ended by SIGKILL"
        assert comparers.equivalent("x+x", "2x")
        assert busy not in comparers.pids
    finally:
        comparers.close()


def test_a_process_that_is_stuck_is_ended_at_its_deadline():
    comparers = Comparers(max_processes=1, deadline_s=0.01)
    with pytest.raises(ProcessFailed, match=r"did not answer within 0\.01 s"):
        comparers.equivalent("x+x", "2x")
    assert comparers.pids == []


def test_closing_ends_the_processes_and_what_waits_for_them(comparers: Comparers, threads: ThreadPoolExecutor):
    waiting = [threads.submit(comparers.equivalent, *SLOW) for _ in range(4)]
    wait_until(lambda: len(comparers.pids) == 2)
    pids = comparers.pids
    comparers.close()
    assert not any(map(runs, pids))
    assert {type(future.exception(WAIT_S)) for future in waiting} == {ProcessFailed}
    assert comparers.pids == []


def test_the_processes_end_when_their_driver_is_killed():
    script = (
        "from slimrl.rewards.comparers import shared_comparers as comparers; import time;"
        "comparers().equivalent('x+x', '2x'); print(*comparers().pids, flush=True); time.sleep(300)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        assert len(pids) == 1
        driver.kill()
    wait_until(lambda: not any(map(runs, pids)))


def test_the_kernel_gives_a_process_no_more_memory_than_its_limit(comparers):
    assert comparers.equivalent("2^{3}", "\\sqrt{64}")
    (pid,) = comparers.pids
    process = psutil.Process(pid)
    before = process.memory_info().vms
    most, _ = process.rlimit(psutil.RLIMIT_AS)
    assert before <= most <= before + MEMORY_BYTES
    with pytest.raises(OutOfCpuTime):
        comparers.equivalent(*SLOW)
    assert comparers.equivalent("2^{3}", "8")
