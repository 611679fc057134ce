"""What the `slimrl` command says apart from errors."""

from contextlib import closing
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slimrl.cli import app
from slimrl.observability.metrics import MetricsWriter
from slimrl.observability.run_folder import RunFolder, open_run_folder
from slimrl.runtime.cluster.ending import what_is_left
from slimrl.runtime.state import CheckpointFolder, RunState

SPLIT = str(Path(__file__).parents[2] / "recipes/qwen3/qwen3_8b_gspo_disaggregated.yaml")


def test_the_version_is_that_of_the_package():
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"slimrl {version('slimrl')}\n")


def test_the_command_that_eval_stands_for_is_not_named():
    assert (
        "Usage: slimrl eval [OPTIONS] {RECIPE}"
        in CliRunner().invoke(app, ["eval", "--help"], prog_name="slimrl").output
    )
    refused = CliRunner().invoke(app, ["eval"], prog_name="slimrl").output
    assert "Try 'slimrl eval --help'" in refused
    compare = CliRunner().invoke(app, ["eval", "compare", "--help"], prog_name="slimrl").output
    assert "Usage: slimrl eval compare [OPTIONS] {A} {B}" in compare


def test_text_of_a_recipe_is_printed_as_it_is(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    recipe = "recipes/qwen3_moe/qwen3_30b_a3b_gspo.yaml"
    refused = CliRunner().invoke(app, ["config", "check", recipe, "agent.tools=['[red]a:b:c']"])
    assert "command line: agent.tools: '[red]a:b:c' is not an import path; write module:function." in refused.output
    shown = CliRunner().invoke(app, ["config", "show", recipe, "agent.system_prompt='[red]a:b:c'"])
    assert "agent.system_prompt" in shown.output
    assert "[red]a:b:c" in shown.output
    long = " ".join(str(number) for number in range(60))
    piped = CliRunner().invoke(app, ["config", "show", recipe, f"agent.system_prompt='{long}'"])
    (line,) = [line.strip() for line in piped.output.splitlines() if "agent.system_prompt" in line]
    assert line.split(None, 1)[1] == f"{long}  command line"
    lines = piped.output.splitlines()
    assert f"rollout.colocated  true  {Path('recipes/base/colocated.yaml')}:3" in lines
    assert "trainer.parallel.virtual_pipeline  null  default" in lines
    assert all(line == line.rstrip() and len(line.split("  ")) == 3 for line in lines)


def test_a_report_says_where_it_is(tmp_path: Path):
    run = open_run_folder(tmp_path, "demo", "seed: 1\n")
    with closing(MetricsWriter(run.metrics)) as writer:
        writer.log(1, {"reward/mean": 0.5})
    out = tmp_path / "curve.png"
    result = CliRunner().invoke(app, ["report", str(run.path), "--out", str(out)])
    assert (result.exit_code, result.output) == (0, f"curve: {out}\n")
    assert out.is_file()


@pytest.mark.parametrize(
    ("command", "option", "work"),
    [
        (("report", "RUN"), "--out", "slimrl.observability.report.write_curve"),
        (("simulate", SPLIT), "--json-file", "slimrl.estimates.simulator.command.Simulator.rows_by_mode"),
        (("eval", "compare", "RUN", "RUN"), "--json-file", "slimrl.evaluation.comparison.compare"),
        (("eval", "plot", "RUN"), "--out", "slimrl.evaluation.plot.write_plot"),
        (("rollout", SPLIT), "--out", "slimrl.runtime.commands.prepare"),
        (("rollout", SPLIT, "--out", "out.jsonl"), "--conversations", "slimrl.runtime.commands.prepare"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command, option, work
):
    def begun(*_: object, **__: object) -> None:
        pytest.fail("the work has begun")

    monkeypatch.setattr(work, begun)
    run = open_run_folder(tmp_path, "demo", "seed: 1\n")
    run.metrics.touch()
    out = run.metrics / "deep" / "file"
    arguments = [str(run.path) if word == "RUN" else word for word in command]
    result = CliRunner().invoke(app, [*arguments, option, str(out)])
    assert (result.exit_code, result.output) == (2, f"{option} {out}: its folder cannot be made: Not a directory.\n")


def test_an_interrupted_run_says_whether_and_how_it_goes_on(tmp_path: Path):
    run = open_run_folder(tmp_path, "demo", "seed: 1\n")
    anew = "the same command with --resume-or-start starts anew."
    assert what_is_left(run) == f"{run.path} holds no checkpoint yet: {anew}"
    checkpoints = CheckpointFolder(run.checkpoints)
    for step in (4, 8):
        checkpoints.finish(checkpoints.begin(step), RunState(step=step), {})
    checkpoints.begin(12)
    newest = run.checkpoints / "step_000008"
    assert what_is_left(run) == f"{newest} is whole: the same command with --resume continues from there."
    (tmp_path / "eval-1").mkdir()
    assert what_is_left(RunFolder(tmp_path / "eval-1")) == ""
