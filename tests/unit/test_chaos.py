"""What benchmarks/chaos.py calls a difference, how it adds up results and deals out faults, and its clock."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def search_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.syspath_prepend(ROOT / "tests" / "integration")


def write_run(path: Path, *losses: float, weights: bytes = b"w"):
    from slimrl.observability.run_folder import RunFolder

    folder = RunFolder(path)
    folder.export.mkdir(parents=True)
    (folder.export / "model.safetensors").write_bytes(weights)
    lines = [{"step": step, "policy/loss": loss, "time/step_s": time.time()} for step, loss in enumerate(losses)]
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_run_differs_by_a_metric_by_its_weights_and_not_by_the_clock(tmp_path: Path):
    from chaos_judge import differences

    whole = write_run(tmp_path / "whole", 0.5, 0.25)
    assert differences(write_run(tmp_path / "same", 0.5, 0.25), whole) == []
    (said,) = differences(write_run(tmp_path / "loss", 0.5, 0.25000001), whole)
    assert "step 1 differs in 1 metrics: {'policy/loss': (0.25000001, 0.25)}" in said
    assert differences(write_run(tmp_path / "weights", 0.5, 0.25, weights=b"v"), whole) == ["the exports differ"]
    assert differences(write_run(tmp_path / "shorter", 0.5), whole) == ["steps 1 and 2"]


def test_steps_that_are_missing_or_there_twice_are_found(tmp_path: Path):
    from chaos_judge import steps_in_order

    folder = write_run(tmp_path / "run", 0.5, 0.25)
    assert steps_in_order(folder) == []
    folder.metrics.write_text('{"step": 0}\n{"step": 2}\n')
    assert steps_in_order(folder) == ["steps [0, 2]"]


def test_results_of_several_sessions_give_one_table(tmp_path: Path):
    from chaos_table import Record, Verdict, figures

    def result(name: str, *records: Record) -> str:
        verdict = Verdict(leg="async", mode="async", seconds=1800.0, steps=9, starts=1)
        file = tmp_path / name
        file.write_text(json.dumps(figures(records, [verdict])))
        return str(file)

    def record(at_s: float, seconds: float | None, **more) -> Record:
        return Record(leg="async", mode="async", kind="engine killed", at_s=at_s, recovery_s=seconds, **more)

    sound = result("a.json", record(1.0, 2.0), record(1796.0, 4.0, lost_steps=3))
    bad = result("b.json", record(1.0, 9.0, ended=True, end_s=5.0), record(1800.0, None, problem="no end within 9 s"))

    def merge(*files: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / "benchmarks" / "chaos.py"), "--merge", *files]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    done = merge(sound, bad)
    assert done.returncode == 1
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("│ engine killed")]
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        "engine killed", "async", "4", "2", "1", "1", "5.0", "4.0", "9.0", "3",
    ]  # fmt: skip
    assert "4 faults in 1.00 h" in done.stdout
    assert "no end within 9 s" in done.stdout
    assert merge(sound).returncode == 0


def test_what_is_left_is_told_once_but_for_caches(tmp_path: Path):
    from chaos_judge import remove_left_files

    memory, temporary = tmp_path / "shm", tmp_path / "tmp"
    for path in (memory / "folder", temporary / "torchinductor_root", temporary / "table", temporary / "wandb-media"):
        path.mkdir(parents=True)
    for name in ("sem.mp-1", "folder/file", "../tmp/torchinductor_root/file", "../tmp/table/trajectories.table.json"):
        (memory / name).touch()
    (temporary / "link").symlink_to(tmp_path)
    left = [memory / "folder", memory / "sem.mp-1", temporary / "link"]
    assert remove_left_files(memory, temporary) == [str(path) for path in left]
    assert remove_left_files(memory, temporary) == []
    assert tmp_path.is_dir()


def test_each_run_has_the_kinds_of_faults_that_its_mode_can_have():
    from chaos_kinds import KINDS
    from chaos_legs import LEGS
    from chaos_session import kinds_of

    kinds = {leg.name: kinds_of(leg, None) for leg in LEGS}
    assert len(KINDS) == 29
    assert kinds["async"] == list(KINDS)
    assert kinds["colocated"] == [
        "engine killed", "engine stopped", "engine's worker killed", "engine's actor killed",
        "engine's packets dropped",
    ]  # fmt: skip
    assert set(kinds["disaggregated"]) == {*kinds["colocated"], "engines' node lost"}
    # An engine that is replaced serves other requests than it would have.
    assert kinds["colocated_exact"] == kinds["disaggregated_exact"]
    assert set(kinds["colocated_exact"]) & set(kinds["colocated"]) == {"engine's packets dropped"}
    assert [kinds_of(leg, ["slow tools", "engine killed"]) for leg in LEGS] == [
        [], ["engine killed"], [], ["engine killed"], ["engine killed", "slow tools"],
    ]  # fmt: skip


def test_faults_are_dealt_out_by_the_number_of_kinds():
    from chaos_session import shares

    assert shares([19, 5, 19, 6, 29], 78) == [19, 5, 19, 6, 29]
    assert shares([19, 5, 19, 6, 29], 7) == [2, 0, 2, 1, 2]
    assert shares([5], 3) == [3]


def test_what_nobody_expected_is_a_problem_of_its_block():
    from chaos_run import Broken
    from chaos_session import noted

    problems: list[str] = []
    for error in (Broken("no end within 9 s"), AssertionError("Ray"), OSError(28, "full")):
        with noted(problems):
            raise error
    assert problems == ["no end within 9 s", "AssertionError('Ray')", "OSError(28, 'full')"]
    with pytest.raises(SystemExit), noted(problems):
        raise SystemExit(1)


def test_the_wall_clock_of_a_process_jumps_and_no_other(tmp_path: Path):
    from chaos_clock import Clock

    clock = Clock(tmp_path)
    program = "import time; input(); print(time.time(), time.monotonic())"
    before = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-c", program], env={**os.environ, **clock.environment},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    clock.jump(-3600)
    wall, monotonic = map(float, process.communicate("\n", timeout=60)[0].split())
    assert wall - time.time() == pytest.approx(-3600, abs=30)
    assert before <= monotonic <= time.monotonic()
