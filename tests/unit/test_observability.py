"""Metrics files, run folders, samples, progress and the curve."""

import ast
import io
import json
import logging
import os
import re
import shutil
import subprocess
import warnings
from contextlib import closing
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired

import numpy as np
import pytest
from rich.console import Console

from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Segment, Status, Trajectory
from slimrl.observability import logs, provenance, run_folder, samples
from slimrl.observability import progress as progress_module
from slimrl.observability.metrics import METRIC_NAMES, MetricsWriter, is_metric, read_metrics
from slimrl.observability.progress import Progress
from slimrl.observability.provenance import append_provenance, collect_provenance
from slimrl.observability.report import _curves, mean_series, series, write_curve
from slimrl.observability.run_folder import RunFolder, open_run_folder, set_aside
from slimrl.observability.samples import write_samples
from slimrl.observability.terminal import plain_console

DOCUMENT = Path(__file__).parents[2] / "docs" / "observing.md"


def trajectory(group: str, index: int) -> Trajectory:
    segment = Segment(
        tokens=np.arange(3, dtype=np.int32), loss_mask=np.array([False, True, True]),
        rollout_logprobs=np.zeros(3, np.float32), weight_versions=np.zeros(3, np.int32), turn_ids=np.zeros(3, np.int16),
    )  # fmt: skip
    return Trajectory(
        group_id=group, trajectory_id=f"{group}/{index}", segments=[segment], status=Status.completed,
        messages=[{"role": "user", "content": "größer?"}],
    )  # fmt: skip


def test_every_metric_is_documented_and_nothing_else_is():
    rows = re.findall(r"^\| `([^`]+)` \|([^|]*)\|([^|]*)\|$", DOCUMENT.read_text(), re.MULTILINE)
    assert [name for name, _, _ in rows] == list(METRIC_NAMES)
    assert [name for name, unit, meaning in rows if not unit.strip() or not meaning.strip()] == []


def test_a_set_is_one_component_of_a_name_and_a_part_may_be_several():
    assert is_metric("eval/heldout/reward_mean")
    assert not is_metric("eval/a/b/reward_mean")
    assert not is_metric("reward/format")
    assert not is_metric("eval/reward_mean")
    assert not is_metric("policy/los")
    assert is_metric("reward/parts/format")
    assert is_metric("reward/parts/format/think")
    assert not is_metric("reward/parts/")


def test_each_step_is_one_json_object_and_what_is_not_finite_is_null(tmp_path):
    with closing(MetricsWriter(tmp_path / "metrics.jsonl")) as writer:
        writer.log(0, {"reward/mean": 0.5, "policy/loss": float("nan"), "rollout/tokens": np.int64(7)})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 0, "reward/mean": 0.5, "policy/loss": None, "rollout/tokens": 7}
    ]


def test_an_undocumented_metric_is_refused(tmp_path):
    with (
        closing(MetricsWriter(tmp_path / "metrics.jsonl")) as writer,
        pytest.raises(AssertionError, match="policy/los"),
    ):
        writer.log(0, {"policy/los": 1.0})


def test_a_resumed_file_loses_the_steps_after_the_checkpoint_and_a_broken_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with closing(MetricsWriter(path)) as writer:
        for step in range(5):
            writer.log(step, {"reward/mean": step / 10})
    uninterrupted = path.read_bytes()
    path.write_bytes(uninterrupted + b'{"step": 5, "rewa')
    with closing(MetricsWriter(path, keep_through_step=2)) as writer:
        writer.log(3, {"reward/mean": 0.3})
        writer.log(4, {"reward/mean": 0.4})
    assert path.read_bytes() == uninterrupted


def test_a_broken_line_inside_a_metrics_file_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n[]\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: not a line of metrics"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_an_existing_run_is_kept_unless_asked_otherwise(tmp_path):
    run = open_run_folder(tmp_path, "demo", "seed: 1\n")
    run.metrics.write_text("kept")
    with pytest.raises(ValueError, match=r"demo exists, without a checkpoint\. Use --resume-or-start to rename it"):
        open_run_folder(tmp_path, "demo", "seed: 2\n")
    (run.checkpoints / "step_000001").mkdir()
    with pytest.raises(ValueError, match=r"demo exists\. Use --resume to continue it, --overwrite"):
        open_run_folder(tmp_path, "demo", "seed: 2\n")
    resumed = open_run_folder(tmp_path, "demo", "seed: 2\n", resume=True)
    assert (resumed.metrics.read_text(), resumed.config.read_text()) == ("kept", "seed: 1\n")
    fresh = open_run_folder(tmp_path, "demo", "seed: 3\n", overwrite=True)
    assert not fresh.metrics.exists()
    assert fresh.config.read_text() == "seed: 3\n"


def test_a_start_that_is_killed_while_it_removes_a_run_leaves_a_whole_new_one_of_its_job(tmp_path, monkeypatch):
    old = open_run_folder(tmp_path, "demo", "seed: 1\n")
    (old.checkpoints / "step_000001").mkdir()
    remove = shutil.rmtree

    class Killed(BaseException):
        """As by a signal."""

    def half_way(path, **how):
        remove(path / "checkpoints")
        raise Killed

    with monkeypatch.context() as held:
        held.setattr(shutil, "rmtree", half_way)
        with pytest.raises(Killed):
            open_run_folder(tmp_path, "demo", "seed: 2\n", overwrite=True, job="7")
    run = RunFolder(tmp_path / "demo")
    assert run.is_of_job("7")
    assert run.config.read_text() == "seed: 2\n"
    assert (run.logs.is_dir(), run.checkpoints.is_dir(), run.has_checkpoint) == (True, True, False)
    # The next start ends what that one began; what is another run's stays.
    open_run_folder(tmp_path, "demo.replaced", "seed: 3\n")
    set_aside(run)
    open_run_folder(tmp_path, "demo", "seed: 2\n", job="7")
    assert {path.name for path in tmp_path.iterdir()} == {"demo", "demo.attempt_000", "demo.replaced"}


def test_a_run_is_that_of_the_jobs_that_opened_it_and_of_no_job_whose_id_is_alike(tmp_path):
    open_run_folder(tmp_path, "demo", "seed: 1\n", job="4711")
    run = RunFolder(tmp_path / "demo")
    assert [job for job in ("4711", "471", "47110", "711", "") if run.is_of_job(job)] == ["4711"]


@pytest.mark.parametrize("renames", [0, 1])
def test_a_start_that_is_killed_before_its_run_appears_leaves_the_earlier_one_or_none(tmp_path, monkeypatch, renames):
    open_run_folder(tmp_path, "demo", "seed: 1\n")
    rename, done = Path.rename, []

    def until_killed(self, target):
        if len(done) == renames:
            raise KeyboardInterrupt
        done.append(target)
        return rename(self, target)

    with monkeypatch.context() as held:
        held.setattr(Path, "rename", until_killed)
        with pytest.raises(KeyboardInterrupt):
            open_run_folder(tmp_path, "demo", "seed: 2\n", overwrite=True, job="7")
    run = RunFolder(tmp_path / "demo")
    assert run.path.exists() == (renames == 0)
    assert not run.is_of_job("7")
    assert open_run_folder(tmp_path, "demo", "seed: 2\n", overwrite=True, job="7").is_of_job("7")
    assert not any("replaced" in path.name for path in tmp_path.iterdir())


def test_a_run_that_another_start_has_made_meanwhile_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "check_run_folder", lambda run, **flags: None)
    other = open_run_folder(tmp_path, "demo", "seed: 1\n")
    with pytest.raises(ValueError, match="demo exists"):
        open_run_folder(tmp_path, "demo", "seed: 2\n")
    assert other.config.read_text() == "seed: 1\n"
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]


def test_a_link_in_a_runs_place_is_not_removed(tmp_path):
    open_run_folder(tmp_path / "scratch", "demo", "seed: 1\n")
    (tmp_path / "demo").symlink_to(tmp_path / "scratch" / "demo")
    with pytest.raises(ValueError, match="is a link"):
        open_run_folder(tmp_path, "demo", "seed: 2\n", overwrite=True)
    assert (tmp_path / "scratch" / "demo" / "config.yaml").is_file()


def test_a_folder_that_is_no_run_is_never_removed_and_no_run_is_never_resumed(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="not a run folder"):
        open_run_folder(tmp_path, "home", "", overwrite=True)
    with pytest.raises(ValueError, match="not a run folder"):
        open_run_folder(tmp_path, "home", "")
    with pytest.raises(ValueError, match="not a run folder"):
        set_aside(RunFolder(tmp_path / "home"))
    assert (tmp_path / "home" / "thesis.tex").exists()
    with pytest.raises(ValueError, match="no run to resume"):
        open_run_folder(tmp_path, "absent", "", resume=True)


def test_runs_that_are_put_aside_keep_their_files_under_names_of_their_own(tmp_path):
    for seed in (1, 2):
        run = open_run_folder(tmp_path, "demo", f"seed: {seed}\n")
        run.log_file("driver").write_text(f"log of {seed}")
        assert set_aside(run) == tmp_path / f"demo.attempt_{seed - 1:03d}"
        assert not run.path.exists()
    assert set_aside(RunFolder(tmp_path / "demo")) is None
    kept = [RunFolder(tmp_path / f"demo.attempt_00{number}") for number in (0, 1)]
    assert [folder.config.read_text() for folder in kept] == ["seed: 1\n", "seed: 2\n"]
    assert [folder.log_file("driver").read_text() for folder in kept] == ["log of 1", "log of 2"]
    # What a start leaves that is killed before it wrote anything.
    (tmp_path / "demo").mkdir()
    assert set_aside(RunFolder(tmp_path / "demo")) is None
    open_run_folder(tmp_path, "demo", "")


def prompts_of(groups: str) -> dict[str, Prompt]:
    return {group: Prompt(prompt_id=group, messages=[], label=f"label of {group}") for group in groups}


def test_samples_are_one_trajectory_per_group_and_readable(tmp_path):
    write_samples(
        tmp_path / "trajectories" / "s.jsonl",
        [trajectory(group, index) for group in "abc" for index in range(2)],
        prompts_of("abc"),
        limit=2,
    )
    text = (tmp_path / "trajectories" / "s.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    assert [row["trajectory_id"] for row in rows] == ["a/0", "b/0"]
    assert "größer?" in text
    assert rows[0]["reward"] is None
    assert [row["label"] for row in rows] == ["label of a", "label of b"]
    assert (rows[0]["num_tokens"], rows[0]["num_sampled_tokens"]) == (3, 2)


def test_images_of_the_samples_are_files_that_their_lines_name(tmp_path):
    shown = [trajectory(group, 0) for group in "abc"]
    for number, one in enumerate(shown):
        one.trajectory_id, one.images = "../out", {0: b"start", number + 1: b"then"}
    write_samples(tmp_path / "trajectories" / "step_1.jsonl", shown, prompts_of("abc"), limit=2)
    rows = [json.loads(line) for line in (tmp_path / "trajectories" / "step_1.jsonl").read_text().splitlines()]
    assert [row["images"] for row in rows] == [
        {"0": "step_1/0_0.png", "1": "step_1/0_1.png"},
        {"0": "step_1/1_0.png", "2": "step_1/1_2.png"},
    ]
    files = {str(file.relative_to(tmp_path)): file.read_bytes() for file in tmp_path.rglob("*.png")}
    assert files == {
        f"trajectories/{name}": b"start" if turn == "0" else b"then"
        for row in rows
        for turn, name in row["images"].items()
    }


def test_each_line_of_the_samples_is_made_visible_once(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(samples, "visible", lambda text: seen.append(text) or text)
    write_samples(tmp_path / "s.jsonl", [trajectory(group, 0) for group in "ab"], prompts_of("ab"), limit=2)
    assert [json.loads(text)["trajectory_id"] for text in seen] == ["a/0", "b/0"]


def test_the_curve_of_an_evaluation_is_its_reward_and_not_its_parts():
    names = ("reward_mean", "accuracy", "pass_at_2", "parts/length", "stderr/reward_mean")
    line = dict.fromkeys((f"eval/a/{name}" for name in names), 1.0)
    assert _curves([[line]]) == ["eval/a/pass_at_2", "eval/a/reward_mean"]


def test_without_a_terminal_progress_is_plain_lines(monkeypatch):
    monkeypatch.setattr(progress_module, "PLAIN_INTERVAL_S", 0.0)
    output = io.StringIO()
    with Progress(10, Console(file=output, force_terminal=False, soft_wrap=True)) as progress:
        with progress.stage("starting Ray"):
            assert output.getvalue() == "starting Ray\n", "said when it begins, not when it is over"
        with progress.phase("rollout", 2, "trajectories") as phase:
            phase.advance()
        progress.summary(3, {"reward/mean": 0.25, "time/step_s": 1.5, "eval/heldout/reward_mean": 0.5})
        progress.summary(4, {"reward/mean": 0.5, "time/step_s": 1.25})
    lines = output.getvalue().splitlines()
    assert lines[:2] == ["starting Ray", "rollout 1/2 trajectories"]
    assert [line.split() for line in lines[2:]] == [
        ["step", "reward", "total"],
        ["3/10", "0.250", "1.5s", "heldout", "0.500"],
        ["4/10", "0.500", "1.2s"],
    ]
    assert "\x1b" not in output.getvalue()


def test_titles_stand_above_the_first_row_above_each_twentieth_and_above_other_columns():
    out = io.StringIO()
    progress = Progress(50, Console(file=out, width=200))
    for step in range(1, 24):
        progress.summary(step, {"reward/mean": 0.5, **({"time/step_s": 2.0} if step > 21 else {})})
    lines = out.getvalue().splitlines()
    titles = [number for number, line in enumerate(lines) if "reward" in line]
    # Before rows 1, 21 and 22; there are 23 rows.
    assert titles == [0, 21, 23]
    assert len(lines) == 26
    assert lines[1].split() == ["1/50", "0.500"]
    assert lines[23].split() == ["step", "reward", "total"]
    assert lines[24].split() == ["22/50", "0.500", "2.0s"]
    assert len({len(line) for line in lines[:23]}) == 1


def test_lines_and_stages_are_said_as_they_are():
    for terminal in (False, True):
        output = io.StringIO()
        with Progress(1, Console(file=output, force_terminal=terminal, width=100)) as progress:
            progress.say("warning: [red]a:b:c")
            with progress.stage("reading [red]:b:"):
                pass
        assert "warning: [red]a:b:c" in output.getvalue()
        assert "reading [red]:b:" in output.getvalue()


def test_on_a_terminal_a_phase_is_a_live_line_that_goes_away():
    output = io.StringIO()
    with Progress(1, Console(file=output, force_terminal=True, width=100)) as progress:
        with progress.phase("rollout", 4, "trajectories") as phase:
            phase.update(3)
            progress.live.refresh()
        assert progress.live.tasks == []
    assert "3/4" in output.getvalue()


def test_on_a_terminal_the_steps_are_counted_and_the_time_left_is_estimated():
    output = io.StringIO()
    with Progress(4, Console(file=output, force_terminal=True, width=100)) as progress:
        now = iter(range(0, 10_000, 60))
        progress.live.get_time = lambda: float(next(now))
        for step in range(4):
            progress.summary(step, {"reward/mean": 0.5})
        (task,) = progress.live.tasks
        assert (task.completed, task.total) == (3, 4)
        assert task.time_remaining == pytest.approx(60, rel=0.5)
        progress.summary(4, {"reward/mean": 0.5})
        assert progress.live.tasks == []


def test_the_mean_over_seeds_is_taken_where_all_of_them_have_a_value():
    runs = [
        series([{"step": 0, "x": 1.0}, {"step": 1, "x": None}, {"step": 2, "x": 3.0}], "x"),
        series([{"step": 0, "x": 2.0}, {"step": 1, "x": 9.0}, {"step": 2, "x": 5.0}], "x"),
    ]
    assert mean_series(runs) == ([0, 2], [1.5, 4.0])


@pytest.mark.parametrize("num_seeds", [1, 2])
def test_the_curve_draws_each_seed_and_their_mean(tmp_path, monkeypatch, num_seeds):
    from matplotlib.axes import Axes

    files = []
    for seed in range(num_seeds):
        files.append(tmp_path / f"{seed}.jsonl")
        with closing(MetricsWriter(files[-1])) as writer:
            for step in range(3):
                writer.log(step, {"reward/mean": step / 4, "eval/heldout/reward_mean": (step + seed) / 4})
    drawn: dict[str, list[float]] = {}
    plot = Axes.plot

    def record(self, x, y, **options):
        if "label" in options:
            drawn[options["label"]] = list(y)
        return plot(self, x, y, **options)

    monkeypatch.setattr(Axes, "plot", record)
    write_curve(files, tmp_path / "curve.png", "title")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    shift = (num_seeds - 1) / 8
    assert drawn == {
        "reward/mean (training)": [0, 0.25, 0.5],
        "eval/heldout/reward_mean": [shift, 0.25 + shift, 0.5 + shift],
    }


def test_a_run_without_rewards_is_drawn_with_its_loss(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    drawn: dict[str, list[float]] = {}
    plot = Axes.plot

    def record(self, x, y, **options):
        drawn[options["label"]] = list(y)
        return plot(self, x, y, **options)

    monkeypatch.setattr(Axes, "plot", record)
    with closing(MetricsWriter(tmp_path / "metrics.jsonl")) as writer:
        for step in (1, 2):
            writer.log(step, {"sft/loss": 2.0 / step, "time/step_s": 1.0})
    write_curve([tmp_path / "metrics.jsonl"], tmp_path / "curve.png")
    assert drawn == {"sft/loss": [2.0, 1.0]}


def test_what_was_never_a_number_is_not_drawn(tmp_path, monkeypatch):
    figure = drawn_by(monkeypatch)
    with closing(MetricsWriter(tmp_path / "m.jsonl")) as writer:
        for step in (1, 2):
            writer.log(
                step, {"reward/mean": float("nan"), "sft/loss": 2.0 / step, "policy/clip_fraction": float("inf")}
            )
    write_curve([tmp_path / "m.jsonl"], tmp_path / "curve.png")
    (main,) = figure().axes
    assert [line.get_label() for line in main.get_lines()] == ["sft/loss"]
    assert main.get_ylabel() == "loss"


def drawn_by(monkeypatch):
    """The figure that write_curve makes, as it is when it is written."""
    from matplotlib.figure import Figure

    kept = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *given, **how: kept.append(self) or save(self, *given, **how))
    return lambda: kept[0]


def test_small_panels_begin_at_zero_or_at_a_power_of_ten(tmp_path, monkeypatch):
    figure = drawn_by(monkeypatch)
    with closing(MetricsWriter(tmp_path / "m.jsonl")) as writer:
        for step in range(3):
            values = {"policy/clip_fraction": 0.1 + step / 10, "mismatch/logprob_abs_mean": 2e-3 * (step + 1)}
            writer.log(step, {"reward/mean": step / 4, **values})
    write_curve([tmp_path / "m.jsonl"], tmp_path / "curve.png", "of a run")
    main, clip, mismatch = figure().axes
    assert (main.get_title(), main.get_ylabel(), main.get_ylim()) == ("of a run", "reward", (-0.02, 1.02))
    assert (clip.get_title(), clip.get_yscale(), clip.get_ylim()[0]) == ("clip fraction", "linear", 0)
    assert 0.3 < clip.get_ylim()[1] < 0.32
    assert (mismatch.get_yscale(), mismatch.get_ylim()) == ("log", (pytest.approx(1e-3), pytest.approx(1e-2)))
    assert (clip.get_xlabel(), mismatch.get_xlabel()) == ("", "step")


def test_the_curve_of_a_short_run_shows_every_value_and_whole_steps(tmp_path, monkeypatch):
    figure = drawn_by(monkeypatch)
    with closing(MetricsWriter(tmp_path / "m.jsonl")) as writer:
        for step in range(1, 5):
            alone = {"mismatch/logprob_abs_mean": 2e-7} if step == 2 else {}
            writer.log(step, {"reward/mean": 0.1 * step, "eval/a/reward_mean": 0.1 * step, **alone})
    write_curve([tmp_path / "m.jsonl"], tmp_path / "curve.png")
    main, mismatch = figure().axes
    training, evaluation = main.get_lines()
    assert training.get_zorder() > evaluation.get_zorder(), "it would be hidden where they are the same"
    assert training.get_linewidth() < evaluation.get_linewidth()
    (value,) = mismatch.get_lines()
    assert list(value.get_xdata()) == [2]
    assert {line.get_marker() for line in (training, evaluation, value)} == {"o"}, "a point alone has no line"
    assert mismatch.get_xlim() == main.get_xlim()
    low, high = main.get_xlim()
    assert [tick for tick in mismatch.get_xticks() if low <= tick <= high] == [1, 2, 3, 4]


def test_the_curve_of_a_run_of_one_step_has_one_tick(tmp_path, monkeypatch):
    figure = drawn_by(monkeypatch)
    with closing(MetricsWriter(tmp_path / "m.jsonl")) as writer:
        writer.log(7, {"reward/mean": 0.5})
    write_curve([tmp_path / "m.jsonl"], tmp_path / "curve.png")
    (main,) = figure().axes
    low, high = main.get_xlim()
    assert [tick for tick in main.get_xticks() if low <= tick <= high] == [7]


def test_the_curve_of_a_long_run_has_no_markers_that_would_run_together(tmp_path, monkeypatch):
    figure = drawn_by(monkeypatch)
    with closing(MetricsWriter(tmp_path / "m.jsonl")) as writer:
        for step in range(100):
            writer.log(step, {"reward/mean": 0.5, **({"eval/a/reward_mean": 0.5} if step % 10 == 0 else {})})
    write_curve([tmp_path / "m.jsonl"], tmp_path / "curve.png")
    training, evaluation = figure().axes[0].get_lines()
    assert (training.get_marker(), evaluation.get_marker()) == ("None", "o")


def test_a_reward_beyond_one_keeps_its_range(tmp_path, monkeypatch):
    figure = drawn_by(monkeypatch)
    with closing(MetricsWriter(tmp_path / "m.jsonl")) as writer:
        for step in range(2):
            writer.log(step, {"reward/mean": 3.0 * step - 1, "eval/b/reward_mean": 0.5, "eval/a/reward_mean": 0.25})
    write_curve([tmp_path / "m.jsonl"], tmp_path / "curve.png")
    (main,) = figure().axes
    low, high = main.get_ylim()
    assert low < -1
    assert high > 2
    labels = [line.get_label() for line in main.get_lines()]
    assert labels == ["reward/mean (training)", "eval/a/reward_mean", "eval/b/reward_mean"]


def test_a_run_with_nothing_to_draw_is_refused(tmp_path):
    with closing(MetricsWriter(tmp_path / "metrics.jsonl")) as writer:
        writer.log(0, {"resync/version": 0})
    with pytest.raises(ValueError, match="no reward or loss"):
        write_curve([tmp_path / "metrics.jsonl"], tmp_path / "curve.png")
    assert not (tmp_path / "curve.png").exists()


def test_a_loss_and_a_reward_are_not_drawn_together(tmp_path):
    files = [tmp_path / "sft.jsonl", tmp_path / "train.jsonl"]
    for file, name in zip(files, ("sft/loss", "reward/mean"), strict=True):
        with closing(MetricsWriter(file)) as writer:
            writer.log(1, {name: 0.5})
    with pytest.raises(ValueError, match=r"sft\.jsonl: a loss, where other runs have rewards"):
        write_curve(files, tmp_path / "curve.png")
    assert not (tmp_path / "curve.png").exists()


def test_a_curve_without_steps_is_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="holds no steps"):
        write_curve([tmp_path / "metrics.jsonl"], tmp_path / "curve.png")


@pytest.mark.parametrize(
    ("answers", "git"),
    [
        (["M x\n", "abc\n"], {"commit": "abc", "dirty": True}),
        (["\n", "abc\n"], {"commit": "abc", "dirty": False}),
        ([None, None], {"commit": None, "dirty": None}),
        ([FileNotFoundError(), TimeoutExpired("git", 20)], {"commit": None, "dirty": None}),
    ],
)
def test_provenance_names_the_commit_where_git_answers(monkeypatch, answers, git):
    def run(command, *, cwd=None, **how):
        if command[0] != "git":  # the standard library asks for the machine's name
            return real_run(command, cwd=cwd, **how)
        assert (cwd, how["check"]) == (Path(provenance.__file__).parent, False)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return CompletedProcess(command, 0 if answer else 128, answer or "fatal\n", "")

    real_run = subprocess.run
    monkeypatch.setattr("subprocess.run", run)
    assert collect_provenance({}, {}, ["slimrl"])["git"] == git


def test_provenance_grows_by_one_entry_at_each_start(tmp_path):
    path = tmp_path / "provenance.json"
    for argv in (["slimrl", "train"], ["slimrl", "train", "--resume"]):
        append_provenance(path, collect_provenance({"seed": 1}, {"seed": "default"}, argv))
    first, second = json.loads(path.read_text())
    assert first["config"] == {"seed": 1}
    assert second["command"][-1] == "--resume"
    assert first["packages"]["omegaconf"].count(".") == 2
    assert first["host"]["cpus"] >= 1


def test_every_metric_name_written_in_the_source_is_a_known_one():
    pattern = re.compile(r"(reward|eval|policy|mismatch|rollout|moe|train|resync|time|sft)/[a-z0-9_]+(/[a-z0-9_]+)?")
    unknown = {
        f"{path.name}:{node.lineno}": node.value
        for path in (DOCUMENT.parents[1] / "slimrl").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and pattern.fullmatch(node.value)
        if not is_metric(node.value)
    }
    assert unknown == {}


def test_a_run_that_ends_before_its_first_metrics_and_checkpoint_is_marked(tmp_path):
    run = open_run_folder(tmp_path, "run", "")
    run.metrics.touch()
    run.note_early_end()
    assert run.ended_early.is_file()
    begun = open_run_folder(tmp_path, "begun", "")
    begun.metrics.write_text('{"step": 0}\n')
    begun.note_early_end()
    saved = open_run_folder(tmp_path, "saved", "")
    (saved.checkpoints / "step_000001").mkdir()
    saved.note_early_end()
    logs = RunFolder(tmp_path / "eval-1")
    logs.logs.mkdir(parents=True)
    logs.note_early_end()
    assert not any(folder.ended_early.exists() for folder in (begun, saved, logs))


def test_an_export_takes_the_place_of_the_one_before(tmp_path):
    run = open_run_folder(tmp_path, "demo", "seed: 1\n")
    assert run.fresh_export() == run.path / "export" / "hf"
    run.export.mkdir(parents=True)
    (run.export / "old.safetensors").touch()
    assert not run.fresh_export().exists()
    assert run.config.is_file()


def test_a_worker_writes_everything_into_its_log(tmp_path, monkeypatch):
    replaced, told = [], []
    monkeypatch.setattr(logs.os, "dup2", lambda source, target: replaced.append((os.fstat(source).st_ino, target)))
    monkeypatch.setattr(logs.faulthandler, "enable", lambda *, file: told.append(file))
    monkeypatch.setattr(logs, "log_to_file", told.append)
    path = tmp_path / "logs" / "trainer_0.log"
    before = len(os.listdir("/proc/self/fd"))
    path.parent.mkdir()
    path.write_text("of the attempt before\n")
    logs.capture_output(path)
    inode = path.stat().st_ino
    assert replaced == [(inode, 1), (inode, 2)]
    assert told == [path, 2]
    assert len(os.listdir("/proc/self/fd")) == before
    assert path.read_text() == "of the attempt before\n"
    logs.capture_output(tmp_path / "deeper" / "logs" / "a.log")
    assert told[2] == tmp_path / "deeper" / "logs" / "a.log"


def test_records_are_written_without_what_is_hidden_and_requests_are_left_out(tmp_path):
    root, httpx = logging.getLogger(), logging.getLogger("httpx")
    before, levels = root.handlers[:], (root.level, httpx.level)
    path = tmp_path / "logs" / "driver.log"
    try:
        logs.log_to_file(path, hide=lambda text: text.replace("secret", "***"))
        assert len(root.handlers) == 1
        logging.getLogger("a.b").info("a secret")
        logging.getLogger("a.b").debug("not so much")
        httpx.info("GET /health")
        httpx.warning("slow")
        try:
            raise ValueError("secret")
        except ValueError:
            logging.getLogger("a.b").exception("broken")
        warnings.warn("of a library", stacklevel=1)
    finally:
        for handler in root.handlers:
            handler.close()
        root.handlers[:] = before
        root.setLevel(levels[0])
        httpx.setLevel(levels[1])
        logging.captureWarnings(False)
    text = path.read_text()
    assert "INFO a.b: a ***\n" in text
    assert "WARNING httpx: slow" in text
    assert "ValueError: ***" in text
    assert not any(word in text for word in ("secret", "health", "not so much"))


def test_what_is_piped_has_its_own_width_and_text_goes_out_as_it_is(capsys):
    assert plain_console(piped_columns=500).width == 500
    assert plain_console().width != 500
    text = "[red]a:smile:b [/x] " + "1.5 " * 100
    plain_console().print(text)
    plain_console(stderr=True).print(text)
    assert capsys.readouterr() == (text + "\n", text + "\n")
    plain_console(soft_wrap=False, piped_columns=40).print("word " * 20)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 40
