"""What is given on the command line reaches what does the work, and how a command ends."""

import logging
import os
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from slimrl import cli
from slimrl.base.errors import Interrupted, Preempted, RunError, StageError
from slimrl.base.folder_lock import folder_lock
from slimrl.cli import runs
from slimrl.cli.exit_codes import exit_codes
from slimrl.config import load
from slimrl.config.schema.recipe import Recipe
from slimrl.estimates.planner import command as planner_command
from slimrl.estimates.planner.hardware import Hardware
from slimrl.estimates.resync.machine import Machine
from slimrl.launch import job_check, submit
from slimrl.launch.reports import LaunchError
from slimrl.observability.logs import log_to_file
from slimrl.runtime import commands, evaluation
from slimrl.runtime.checks import config_check
from slimrl.runtime.resync_tools import resync_bench


def invoke(*arguments: object):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


@pytest.fixture
def told(monkeypatch):
    """Replaces a function by one that notes its arguments, and what it was given."""

    def of(module, name, answer=None):
        calls = []

        def note(*arguments, **settings):
            calls.append((arguments, settings))
            return answer

        monkeypatch.setattr(module, name, note)
        return calls

    return of


def options_of(settings: dict[str, object]) -> list[str]:
    options = []
    for name, value in settings.items():
        option = f"--{name.replace('_', '-')}"
        options += [option] if value is True else [option, str(value)]
    return options


RECIPES = Path(__file__).parents[2] / "recipes" / "tiny_moe"
FLAGS = {"resume": True, "overwrite": True, "job": "7", "checkpoint_log": Path("log"), "ray_address": "h:1"}


@pytest.mark.parametrize("command", ["train", "sft"])
def test_a_run_is_told_what_becomes_of_an_earlier_one(told, command):
    calls, _ = told(commands, command), told(runs, "_refuse_early")
    assert invoke(command, "r.yaml", "a=1", "b=2", *options_of(FLAGS)).exit_code == 0
    assert invoke(command, "r.yaml").exit_code == 0
    plain = {"resume": False, "overwrite": False, "job": None, "checkpoint_log": None, "ray_address": None}
    rest = {"profiled": None}
    assert calls == [((Path("r.yaml"), ["a=1", "b=2"]), FLAGS | rest), ((Path("r.yaml"), []), plain | rest)]
    for flag in ("--resume", "--overwrite"):
        refused = invoke(command, "r.yaml", "--resume-or-start", flag)
        assert (refused.exit_code, len(calls)) == (2, 2)
        assert "--resume-or-start goes neither with --resume nor with --overwrite." in refused.output


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "exists, without a checkpoint. Use --resume-or-start"),
        (["--profile", "2,9"], "--profile: there is no step 9; the run has 3."),
        (["--resume", "run.name=other"], "there is no run to resume."),
    ],
)
def test_what_arguments_and_the_runs_folder_forbid_is_refused_before_the_command_begins(told, tmp_path, flags, said):
    calls = told(commands, "train")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").touch()
    recipe = RECIPES / "gspo_calculator.yaml"
    refused = invoke("train", recipe, "model.path=x", "steps=3", f"run.dir={tmp_path}", "run.name=mine", *flags)
    assert (refused.exit_code, calls) == (2, [])
    assert said in refused.output


def test_a_run_that_lives_is_said_to_be_in_use(told, tmp_path):
    calls = told(commands, "train")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").touch()
    with folder_lock(tmp_path / "mine"):
        refused = invoke(
            "train", RECIPES / "gspo_calculator.yaml", "model.path=x", f"run.dir={tmp_path}", "run.name=mine"
        )
    assert (refused.exit_code, calls) == (2, [])
    assert "is in use by process" in refused.output


def test_a_recipe_from_a_pipe_is_looked_at_and_handed_to_the_command(told, tmp_path):
    calls = told(commands, "train")
    reading, writing = os.pipe()
    base = f"{RECIPES.parent / 'base'}/"
    os.write(writing, (RECIPES / "gspo_calculator.yaml").read_text().replace("../base/", base).encode())
    os.close(writing)
    pipe = f"/dev/fd/{reading}"
    assert invoke("train", pipe, "model.path=x", f"run.dir={tmp_path}").exit_code == 0
    wrong = invoke("train", pipe, "model.path=x", f"run.dir={tmp_path}", "steps=few")
    os.close(reading)
    assert (wrong.exit_code, len(calls)) == (2, 1)
    assert "command line: steps: expected int, got 'few'." in wrong.output


def test_training_on_a_file_is_told_which_and_how_often(told):
    calls, trained = told(commands, "train_on_file"), told(commands, "train")
    arguments = ["train", "r.yaml", "a=1", "--trajectories", "t.jsonl", "--steps", "3"]
    assert invoke(*arguments, "--overwrite", "--ray-address", "h:1").exit_code == 0
    settings = {
        "trajectories": Path("t.jsonl"), "steps": 3, "overwrite": True, "ray_address": "h:1", "profiled": None,
    }  # fmt: skip
    assert calls == [((Path("r.yaml"), ["a=1"]), settings)]
    for part in (["--trajectories", "t.jsonl"], ["--steps", "3"]):
        refused = invoke("train", "r.yaml", *part)
        assert (refused.exit_code, refused.output) == (2, "--trajectories and --steps go together.\n")
    refused = invoke(*arguments, "--resume", "--job", "7")
    assert "--resume and --job cannot go with --trajectories" in refused.output
    for flag in (["--resume"], ["--resume-or-start"], ["--job", "7"], ["--checkpoint-log", "log"]):
        refused = invoke(*arguments, *flag)
        assert (refused.exit_code, refused.output.split()[0]) == (2, flag[0]), flag
    assert (len(calls), trained) == (1, [])


@pytest.mark.parametrize(
    ("command", "function", "settings"),
    [
        (
            "eval",
            "evaluate",
            {
                "past": Path("old"),
                "checkpoint": Path("hf"),
                "out": Path("o"),
                "json_file": Path("f.json"),
                "ray_address": "h:1",
            },
        ),
        (
            "rollout",
            "rollout",
            {"out": Path("t.jsonl"), "conversations": Path("c.jsonl"), "min_reward": 0.5, "ray_address": "h:1"},
        ),
        ("export", "export", {"checkpoint": Path("step"), "out": Path("hf"), "ray_address": "h:1"}),
    ],
)
def test_other_commands_are_told_their_settings_and_files(told, command, function, settings):
    calls = told(evaluation if command == "eval" else commands, function)
    assert invoke(command, "r.yaml", "a=1", *options_of(settings)).exit_code == 0
    assert calls == [((Path("r.yaml"), ["a=1"]), settings)]
    optional = ("json_file", "ray_address", *(["out"] if command == "eval" else []))
    needed = {name: value for name, value in settings.items() if name not in optional}
    assert invoke(command, "r.yaml", *options_of(needed)).exit_code == 0
    assert calls[1] == ((Path("r.yaml"), []), {name: needed.get(name) for name in settings})


def test_every_option_of_a_plan_is_that_of_its_hardware_or_its_question(told):
    calls = told(planner_command, "run", answer=True)
    links = {name: float(n) for n, name in enumerate(("memory_gb_per_s", "nvlink_gb_per_s", "network_gb_per_s"), 101)}
    hardware = {"gpus_per_node": 4, "gpu_memory_gib": 81.0, "reserve_gib": 5.0, "host_memory_gib": 900.0}
    hardware |= {"peak_tflops": 300.0, "mfu": 0.5, "expert_load": 1.5}
    asked = {"mean_tokens": 700, "suggest": True, "gpus": 32, "top": 3, "json": True}
    assert invoke("plan", "r.yaml", "a=1", *options_of({**links, **hardware, **asked})).exit_code == 0
    assert invoke("plan", "r.yaml").exit_code == 0
    ((path, overrides, given), settings), ((_, without, plain), others) = calls
    assert (path, overrides, without) == (Path("r.yaml"), ["a=1"], [])
    assert given == Hardware(**hardware, links=Machine(**links))
    assert settings == {"mean_tokens": 700, "suggestions_wanted": True, "gpus": 32, "top": 3, "to_json": True}
    assert plain == Hardware()
    assert others == {"mean_tokens": None, "suggestions_wanted": False, "gpus": None, "top": 8, "to_json": False}
    told(planner_command, "run", answer=False)
    assert invoke("plan", "r.yaml").exit_code == 1


def test_a_measured_resync_is_told_size_family_and_repeats(told):
    calls = told(resync_bench, "bench_resync")
    settings = {"gigabytes": 2.5, "repeats": 7, "family": "qwen3_moe", "json": True}
    assert invoke("resync", "bench", "r.yaml", "a=1", *options_of(settings)).exit_code == 0
    del settings["json"]
    assert calls == [((Path("r.yaml"), ["a=1"]), {**settings, "to_json": True})]


def test_every_option_of_a_job_is_in_what_is_checked_and_submitted(told, monkeypatch):
    checked, written = told(job_check, "check_job", answer=("note",)), told(submit, "job_script", answer="script\n")
    submitted = told(submit, "submit", answer=(Path("f.sbatch"), "Submitted batch job 5"))
    monkeypatch.setattr(load, "intended_command", lambda path, overrides: "sft" if overrides else "train")
    loaded = Recipe()
    loaded.run.name = "demo"
    read = told(load, "load_recipe", answer=SimpleNamespace(recipe=loaded))
    settings = {
        "nodes": 3, "spares": 2, "gpus_per_node": 4, "partition": "p", "account": "acct", "time": "1:00:00",
        "container": "i.sqsh", "container_mounts": "/a:/b", "venv": Path("venv"), "log_dir": Path("logs"),
        "cores_per_node": 32, "min_free_gib": 9.5, "object_store_gib": 3.5, "preflight_timeout_s": 11.0,
        "allreduce_timeout_s": 12.0, "signal_s": 400, "resume": True, "overwrite": True,
    }  # fmt: skip
    more = ["--sbatch", "--qos=high", "--sbatch", "--hold"]
    result = invoke("launch", "slurm", "dir/r.yaml", "a=1", *options_of(settings), *more)
    assert result.exit_code == 0
    assert result.stdout == "Submitted batch job 5\nscript: f.sbatch\nlogs: logs/JOB/latest\n"
    assert result.stderr == "note\n"
    job = submit.SlurmJob(**settings, sbatch=("--qos=high", "--hold"), sft=True)
    assert {field.name for field in fields(job)} == {*settings, "sbatch", "sft", "name", "spare_nodes"}
    assert checked == [((Path("dir/r.yaml"), ["a=1"], job), {"files": True})]
    assert read == [((Path("dir/r.yaml"), ["a=1"], "sft"), {})]
    assert written == [((Path("dir/r.yaml"), ["a=1"], replace(job, name="demo")), {})]
    assert submitted == [(("script\n", "demo", Path("logs")), {})]
    dry = invoke("launch", "slurm", "r.yaml", "--nodes", 1, "--dry-run")
    assert (dry.exit_code, dry.stdout, len(submitted)) == (0, "script\n", 1)
    assert checked[1] == ((Path("r.yaml"), [], submit.SlurmJob(nodes=1)), {"files": False})
    assert asdict(submit.SlurmJob(nodes=1, name="demo")) == asdict(written[1][0][2])
    # Which the recipe may say as well.
    loaded.trainer.spare_nodes = 2
    assert invoke("launch", "slurm", "r.yaml", "--nodes", 1, "--spare-nodes", 2, "--dry-run").exit_code == 0
    spared = submit.SlurmJob(nodes=1, name="demo", spare_nodes=2)
    assert written[2] == ((Path("r.yaml"), ["trainer.spare_nodes=2"], replace(spared, sft=True)), {})


def test_recipes_and_settings_of_a_check_are_told_apart(told):
    calls = told(config_check, "check_recipes", answer=True)
    arguments = ["a.yaml", "run.name=x", "b=1.yaml", "dir/c=d.yaml", "--command", "sft", "--files", "--data"]
    assert invoke("config", "check", *arguments).exit_code == 0
    ((paths, overrides), settings) = calls[0]
    assert (paths, overrides) == ([Path("a.yaml"), Path("dir/c=d.yaml")], ["run.name=x", "b=1.yaml"])
    assert (settings["command"], settings["files"], settings["data"]) == ("sft", True, True)
    assert invoke("config", "check", "a.yaml").exit_code == 0
    assert (calls[1][1]["command"], calls[1][1]["files"], calls[1][1]["data"]) == (None, False, False)
    none = invoke("config", "check", "a=1")
    assert (none.exit_code, none.output, len(calls)) == (2, "no recipe given.\n", 2)
    forgotten = invoke("config", "check", "a.yaml", "rollout.mode")
    said = "rollout.mode is a setting, which needs a value: rollout.mode=VALUE.\n"
    assert (forgotten.exit_code, forgotten.output, len(calls)) == (2, said, 2)
    for command in ("check", "show"):
        other = invoke("config", command, "a.yaml", "--command", "export")
        assert other.exit_code == 2
        assert "'export' is not one of 'train'" in other.output
    told(config_check, "check_recipes", answer=False)
    assert invoke("config", "check", "a.yaml").exit_code == 1


@pytest.mark.parametrize(
    ("error", "code", "said", "logged"),
    [
        (ValueError("wrong [red]key[/red] :x:"), 2, "wrong [red]key[/red] :x:", "refused"),
        (RunError("it broke"), 1, "failed: it broke", "failed: it broke"),
        (StageError("rank 3 died", "with its traceback"), 1, "failed: rank 3 died", "failed: with its traceback"),
        (LaunchError("sbatch: no"), 1, "failed: sbatch: no", "failed: sbatch: no"),
        (Preempted("made room"), 75, "made room", None),
        (KeyboardInterrupt(), 1, "ended by SIGINT", "ended by SIGINT"),
        (Interrupted("ended by SIGTERM"), 1, "ended by SIGTERM", "ended by SIGTERM"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_each_way_to_end_has_its_exit_code_and_one_message(error, code, said, logged, monkeypatch, capsys, caplog):
    monkeypatch.setattr(logging.root, "handlers", [caplog.handler])  # not those of a run before this test
    caplog.set_level(logging.INFO)
    with pytest.raises(typer.Exit) as ended, exit_codes():
        raise error
    assert ended.value.exit_code == code
    assert capsys.readouterr() == ("", f"{said}\n")
    assert [record.getMessage() for record in caplog.records] == ([] if logged is None else [logged])
    assert any(record.exc_info for record in caplog.records) is isinstance(error, ValueError)


def test_a_run_that_fails_names_the_folder_of_its_logs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    before = logging.root.handlers[:], logging.root.level
    for error, code, said in (
        (RunError("it broke"), 1, "failed: it broke\nlogs: runs/demo/logs\n"),
        (ValueError("wrong key"), 2, "wrong key\n"),
    ):
        try:
            log_to_file(Path("runs/demo/logs/driver.log"))
            with pytest.raises(typer.Exit) as ended, exit_codes():
                raise error
        finally:
            logging.basicConfig(handlers=before[0], level=before[1], force=True)
            logging.captureWarnings(False)
        assert (ended.value.exit_code, capsys.readouterr().err) == (code, said)


def test_what_is_a_fault_of_ours_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError), exit_codes():
        raise ZeroDivisionError


def test_a_command_ends_by_its_code_where_a_call_of_the_task_hangs(monkeypatch):
    ends = []
    monkeypatch.setattr(cli, "end_process_if_calls_hang", ends.append)
    monkeypatch.setattr(planner_command, "run", lambda *arguments, **settings: False)
    for arguments in (["plan", "r.yaml"], ["--version"], ["nonsense"]):
        with pytest.raises(SystemExit):
            cli.app(arguments)
    assert ends == [1, 0, 2]


def test_modules_beside_the_recipe_are_found_by_every_command(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["elsewhere"])
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    cli._set_up()
    assert sys.path == [str(tmp_path), "elsewhere"]
    assert [type(handler) for handler in logging.getLogger().handlers] == [logging.NullHandler]
