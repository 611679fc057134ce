"""What `slimrl watch` shows of a run's folder."""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict

import pytest
from page_run import HOSTILE, STEPS, make_run, metrics
from rich.console import Console
from terminal_run import CONTROL

from slimrl.base.folder_lock import folder_lock
from slimrl.observability.now_file import Doing, Now
from slimrl.observability.watch.braille import braille_rows
from slimrl.observability.watch.curves import curve_panels
from slimrl.observability.watch.present import engine_lines
from slimrl.observability.watch.screen import watch
from slimrl.observability.watch.speed import seconds_left, tokens_per_s


@pytest.fixture
def run(tmp_path):
    made = make_run(tmp_path / "gspo")
    sample = {
        "group_id": "g", "trajectory_id": "t", "status": "completed", "reward": 0.5,
        "messages": [
            {"role": "user", "content": f"question {HOSTILE[6]}"},
            {"role": "assistant", "content": f"answer {HOSTILE[0]}\r\x1b]0;title\x07{HOSTILE[6]}"},
        ],
    }  # fmt: skip
    lines = [sample, {**sample, "reward": None, "status": "failed", "messages": []}]
    made.sample_file(STEPS).write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"half')
    return made


def shown(run, capsys) -> str:
    """A frame without a terminal."""
    watch(run.path, once=False)
    text = capsys.readouterr().out
    assert CONTROL.search(text) is None
    return text


def dots(rows: list[str]) -> set[tuple[int, int]]:
    """(column, row) of each dot by the Unicode standard's numbers: 1 2 3 7 go down the left side, 4 5 6 8 the right."""
    places = {1: (0, 0), 2: (0, 1), 3: (0, 2), 7: (0, 3), 4: (1, 0), 5: (1, 1), 6: (1, 2), 8: (1, 3)}
    return {
        (2 * column + places[number][0], 4 * row + places[number][1])
        for row, line in enumerate(rows)
        for column, character in enumerate(line)
        for number in places
        if character != " " and (ord(character) - 0x2800) >> (number - 1) & 1
    }


def test_a_curve_goes_through_its_points_and_has_a_dot_in_each_column():
    drawn = braille_rows([(0, 0), (4, 2), (9, 1)], width=5, height=2, x_range=(0, 9), y_range=(0, 2))
    assert [len(line) for line in drawn] == [5, 5]
    found = dots(drawn)
    # Ten columns for ten steps; eight rows from 2 at the top to 0 at the bottom, and 1 in the middle.
    assert {(0, 7), (4, 0)} <= found
    assert (9, 3) in found or (9, 4) in found
    assert {column for column, _ in found} == set(range(10))
    for column in range(4):
        heights = [row for place, row in found if place == column]
        assert all(abs(row - (7 - 7 * column / 4)) <= 1 for row in heights)


def test_a_curve_of_one_value_is_a_line_in_the_middle():
    found = dots(braille_rows([(1, 5.0), (2, 5.0)], width=2, height=1, x_range=(1, 2), y_range=(5, 5)))
    assert found == {(column, 1) for column in range(4)}


def test_panels_are_as_many_as_fit_and_the_others_are_named(capsys):
    steps = [{"step": s, "reward/mean": s / 2, "eval/a/reward_mean": 0.5, "eval/b/reward_mean": 0.25} for s in (1, 2)]
    steps.append({"step": 3, "reward/mean": None})
    console = Console(width=80)
    console.print(curve_panels(steps, 80, 8))
    text = capsys.readouterr().out
    assert "reward/mean 1 at step 2" in text
    assert "eval/a/reward_mean 0.5 at step 2" in text
    assert text.splitlines()[-1].split() == ["eval/b/reward_mean", "0.25"]
    assert len(text.splitlines()) == 8
    assert all(len(line) <= 80 for line in text.splitlines())


def test_a_complete_run_is_one_frame_with_its_curve_its_speed_and_its_answers(run, capsys):
    text = shown(run, capsys)
    assert f"complete  step {STEPS} of {STEPS}" in text
    assert "reward/mean 0.3 at step 3" in text
    assert "answers" in text
    assert f"of step {STEPS}" in text
    head, newest, middle = (
        line.split() for line in text.splitlines() if "6.00 s" in line or "rollout  " in line or "median" in line
    )
    assert head == ["rollout", "train", "other", "step", "tokens/s"]
    assert newest == ["step", "3", "6.00", "s", "1.00", "s", "0.50", "s", "7.50", "s"]
    assert middle[:5] == ["median", "of", "3", "4.00", "s"]


def test_hostile_text_is_shown_as_what_it_is_and_fits_into_the_lines(run, capsys):
    text = shown(run, capsys)
    for hidden in ("\\u202e", "\\u001b]0;title\\u0007", "<script>", "\\u2028", "\\ud800"):
        assert hidden in text
    assert "\u202e" not in text
    assert "failed" in text
    assert max(len(line) for line in text.splitlines()) <= 110


def test_a_run_that_failed_says_why(run, capsys):
    run.metrics.write_text(json.dumps(metrics(1, 0)) + "\n")
    cause = "2026-01-03 00:00:00,000 ERROR slimrl.cli.exit_codes: failed: engine 0 ended\x1b[2J\nwith exit code 1\n"
    run.log_file("driver").write_text(cause)
    text = shown(run, capsys)
    assert f"failed  step 1 of {STEPS}\nengine 0 ended\\u001b[2J\nwith exit code 1\n" in text


@pytest.fixture
def now():
    began = time.time() - 100
    doing = (Doing(name="rollout", since=began), Doing(name="rollout", since=began, done=1, total=4, unit="games"))
    engines = {"engines": {"serving": 2, "evaluating": 0, "waiting": 0, "down": 1}}
    return Now(step=2, steps=STEPS, doing=doing, engines=engines)


def test_a_running_one_says_what_it_does_for_how_long_and_what_is_left(run, now, capsys):
    run.metrics.write_text(json.dumps(metrics(1, 0)) + "\n")
    run.now.write_text(json.dumps(asdict(now)))
    with folder_lock(run.path):
        text = shown(run, capsys)
    assert f"running  step 1 of {STEPS}" in text
    assert f"in use by process {os.getpid()}" in text
    assert "step 2: rollout for 0:01:40" in text
    assert "rollout 1/4 games" in text
    # A quarter took 100 s.
    assert "0:01:40, about 0:05:00 left" in text
    assert "engines: 2 of 3 serve, 1 starting again or ended" in text
    # Each step takes 3.5 s and its evaluation 0.7.
    assert "about 0:00:08 left" in text


def test_a_run_that_was_killed_is_not_running_and_says_where_it_was(run, now, capsys):
    run.now.write_text(json.dumps(asdict(now)))
    text = shown(run, capsys)
    assert (
        f"ended early  step {STEPS} of {STEPS}\nnot running: it was killed, step 2 of {STEPS}, rollout 1/4 games"
        in text
    )
    assert "2 of 3 serve" not in text


def test_a_run_that_has_no_metrics_yet_is_shown(run, capsys):
    run.metrics.unlink()
    for path in run.trajectories.iterdir():
        path.unlink()
    with folder_lock(run.path):
        assert "no step has ended yet" in shown(run, capsys)


@pytest.mark.parametrize("options", [[], ["--once"]])
def test_the_command_prints_a_frame_into_a_pipe_and_ends(run, options):
    command = [sys.executable, "-m", "slimrl.cli", "watch", str(run.path), *options]
    with folder_lock(run.path):
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert CONTROL.search(ended.stdout) is None
    assert "running" in ended.stdout


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="there is no run"):
        watch(tmp_path, once=True)


def test_the_time_left_is_that_of_the_last_steps_and_of_evaluations():
    steps = [{"step": 0, "time/step_s": 500.0}]
    steps += [{"step": s, "time/step_s": 10.0 if s > 10 else 90.0} for s in range(1, 31)]
    steps[10]["time/eval_s"] = 60.0
    # Of the last 20 each took 10 s, and a step in 30 had an evaluation of 60 s.
    assert seconds_left(steps, 40, 5.0) == pytest.approx(10 * (10.0 + 60.0 / 30) - 5.0)
    assert seconds_left(steps, 30, 5.0) == 0.0
    assert seconds_left(steps[:1], 30, 0.0) is None


def test_tokens_a_second_are_those_of_the_rollout_or_of_supervised_training():
    assert tokens_per_s({"rollout/tokens_per_s": 12.0, "time/step_s": 3.0}) == 12.0
    assert tokens_per_s({"sft/tokens": 300, "time/step_s": 2.0}) == 150.0
    assert tokens_per_s({"time/step_s": 2.0}) is None


def test_the_engines_of_each_role_have_a_line():
    serving = {"serving": 1, "evaluating": 1, "waiting": 1, "down": 0}
    lines = engine_lines(
        {"engines": serving, "teacher": {**serving, "evaluating": 0}, "load": {"requests": 7, "usage": 0.25}}
    )
    assert lines == [
        "engines: 1 of 3 serve, 1 for evaluations, 1 waiting for weights; 7 requests under way, fullest cache 25%",
        "teacher: 1 of 2 serve, 1 waiting for weights",
    ]
