"""What `slimrl launch slurm` refuses before it submits."""

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from slimrl_tools.toy.toy import ToySize, write_toy
from typer.testing import CliRunner

from slimrl.cli import app
from slimrl.config.problems import RecipeError
from slimrl.launch.job_check import _check_settings, check_job
from slimrl.launch.submit import SlurmJob, check_sbatch, job_script
from slimrl.launch.time_limit import check_time_limit, time_limit_s
from slimrl.observability.run_folder import RunFolder, open_run_folder

ROOT = Path(__file__).parents[2]
TINY = Path("recipes/tiny_moe/gspo_calculator.yaml")
FAMILY = "recipes/qwen3_moe"


def launch(*arguments: str):
    return CliRunner().invoke(app, ["launch", "slurm", *arguments, "--dry-run"])


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("30", 1800), ("30:15", 1815), ("4:00:00", 14400), ("100:00:01", 360001)),
        *(("2-0", 172800), ("1-12:30", 131400), ("1-12:30:10", 131410)),
        *(("UNLIMITED", float("inf")), ("infinite", float("inf")), ("0", float("inf"))),
    ],
)
def test_a_time_limit_is_read_as_slurm_reads_it(text: str, seconds: float):
    assert time_limit_s(text) == seconds


@pytest.mark.parametrize("text", ["5x", "", "4h", "1.5", "-5", "1-", "1:2:3:4", "1-2:3:4:5", " 5"])
def test_a_time_limit_that_slurm_does_not_take_is_refused(text: str):
    with pytest.raises(ValueError, match=r"no time limit of SLURM\. Use MINUTES"):
        time_limit_s(text)


def test_a_job_that_would_be_signalled_as_it_begins_is_refused():
    for text in ("5", "6:00"):
        with pytest.raises(ValueError, match=f"--time {text}: SLURM would ask for a checkpoint at once"):
            check_time_limit(text, 300)
    check_time_limit("7", 300)
    check_time_limit("0", 300)
    refused = launch(f"{FAMILY}/qwen3_30b_a3b_gspo.yaml", "--nodes", "1", "--time", "5x")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr.startswith("--time 5x: no time limit of SLURM.")


def test_a_grace_that_leaves_no_time_to_save_is_told():
    recipe = f"{FAMILY}/qwen3_30b_a3b_gspo.yaml"
    told = "checkpoint.grace_s: warning: a rollout may take 240 s, but the job waits only 240 s"
    assert told in launch(recipe, "checkpoint.grace_s=240", "--nodes", "1").stderr
    assert (
        "checkpoint.grace_s" not in launch(recipe, "checkpoint.grace_s=240", "--nodes", "1", "--signal-s", "900").stderr
    )


def test_a_run_that_wandb_would_not_take_is_told_before_it_waits_in_the_queue(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    recipe, online = f"{FAMILY}/qwen3_30b_a3b_gspo.yaml", "tracking.wandb=online"
    told = "command line: tracking.wandb: warning: online needs an API key of api.wandb.ai: WANDB_API_KEY is not set"
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert launch(recipe, online, "--nodes", "1").stderr.count(told) == 1
    assert "tracking.wandb" not in launch(recipe, "--nodes", "1").stderr
    assert "tracking.wandb" not in launch(recipe, "tracking.wandb=offline", "--nodes", "1").stderr
    # A container does not see the home folder.
    (tmp_path / "netrc").write_text(f"machine api.wandb.ai\n  login user\n  password {'k' * 40}\n")
    assert "tracking.wandb" not in launch(recipe, online, "--nodes", "1").stderr
    assert launch(recipe, online, "--nodes", "1", "--container", "image.sqsh").stderr.count(told) == 1
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    assert "tracking.wandb" not in launch(recipe, online, "--nodes", "1", "--container", "image.sqsh").stderr


def test_a_recipe_from_a_pipe_which_no_job_could_read_is_refused():
    reading, writing = os.pipe()
    os.close(writing)
    refused = launch(f"/dev/fd/{reading}", "--nodes", "1")
    os.close(reading)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr == f"/dev/fd/{reading}: a pipe, which the job could not read. Write the recipe to a file.\n"


def test_nodes_that_the_run_would_not_use_are_refused_but_as_replacement_or_spare_nodes():
    recipe = f"{FAMILY}/qwen3_30b_a3b_gspo_disaggregated.yaml"
    refused = launch(recipe, "--nodes", "4")
    assert (refused.exit_code, refused.stdout) == (2, "")
    said = refused.stderr
    assert (
        f"{recipe}: the run fills 2 nodes of 8 GPUs; give --nodes 2. To use 2 more, raise trainer.num_ranks or " in said
    )
    assert "replacement nodes, for those that fail a check before the start (--spares 2). `slimrl plan" in said
    assert f"`slimrl plan {recipe} --suggest --gpus RANKS` lists layouts" in said
    few = launch(recipe, "--nodes", "1").stderr
    assert f"needs 2 nodes of 8 GPUs; --nodes 1 is too few. `slimrl plan {recipe} --suggest --gpus RANKS` lists" in few
    assert "#SBATCH --nodes=4\n" in launch(recipe, "--nodes", "2", "--spares", "2").stdout


def test_spare_nodes_come_on_top_of_those_that_the_run_fills():
    two = (f"{FAMILY}/qwen3_30b_a3b_gspo_disaggregated.yaml", "trainer.num_ranks=16")
    (needed,) = re.findall(r"the run fills (\d+) nodes", launch(*two, "--nodes", "9").stderr)
    fills = f"the run fills {needed} nodes of 8 GPUs; "
    more = int(needed) + 1
    spare = launch(*two, "--nodes", str(more), "trainer.spare_nodes=1").stderr
    assert f"{fills}trainer.spare_nodes (1) comes on top: give --nodes {needed}.\n" in spare
    both = launch(*two, "--nodes", str(more + 1), "--spares", "1", "--spare-nodes", "1").stderr
    assert f"{fills}--spares (1) and trainer.spare_nodes (1) come on top: give --nodes {needed}.\n" in both
    assert "before the start (--spares 1), or as spare nodes, for those that are lost later (--spare-nodes 1). " in (
        launch(*two, "--nodes", str(more)).stderr
    )
    assert "before the start (--spares 2), or as spare nodes, for those that are lost later (--spare-nodes 3). " in (
        launch(*two, "--nodes", str(more + 1), "trainer.spare_nodes=1").stderr
    )
    assert "--spare-nodes" not in launch(*two, "--nodes", str(more), "run.max_restarts=0").stderr
    assert f"#SBATCH --nodes={int(needed) + 3}\n" in (
        launch(*two, "--nodes", needed, "--spares", "1", "--spare-nodes", "2").stdout
    )


def test_spare_nodes_are_refused_where_all_ranks_are_on_the_first_node():
    recipe = f"{FAMILY}/qwen3_30b_a3b_gspo_disaggregated.yaml"
    refused = launch(recipe, "--nodes", "2", "--spare-nodes", "1")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert (
        "trainer.spare_nodes: 1: all trainer ranks are on the driver's node, whose loss ends the run" in refused.stderr
    )


def test_a_recipe_for_sft_is_launched_and_shown_as_one():
    recipe = f"{FAMILY}/qwen3_30b_a3b_sft.yaml"
    written = launch(recipe, "--nodes", "1")
    assert written.exit_code == 0, written.output
    assert f" --sft {recipe}\n" in written.stdout
    shown = CliRunner().invoke(app, ["config", "show", recipe])
    assert shown.exit_code == 0, shown.output
    assert "sft.max_tokens" in shown.stdout


def test_a_dry_run_names_the_job_after_its_run_and_tells_that_sbatch_needs_the_folder_of_the_log(tmp_path: Path):
    recipe, told = f"{FAMILY}/qwen3_30b_a3b_gspo.yaml", f"mkdir -p {tmp_path / 'logs'}"
    for log_dir, is_told in ((tmp_path / "logs", True), (tmp_path, False)):
        dry = launch(recipe, "run.name=mine", "--nodes", "1", "--log-dir", str(log_dir))
        lines = dry.stdout.splitlines()
        assert "#SBATCH --job-name=slimrl-mine" in lines
        assert f"# SLURM drops a job whose log it cannot open. Before sbatch: mkdir -p {log_dir}" in lines
        assert (told in dry.stderr) is is_told
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"nodes": 0}, "--nodes 0 --spares 0: needs at least 1 node and 0 replacement nodes."),
        ({"spares": -1}, "--nodes 1 --spares -1: needs at least 1 node"),
        ({"container": "i", "venv": Path("v")}, "--container and --venv exclude each other."),
        ({"container_mounts": "/a:/b"}, "--container-mounts needs --container."),
        ({"resume": True, "overwrite": True}, "--resume and --overwrite exclude each other."),
        ({"signal_s": 60}, "--signal-s 60: must exceed the 60 s that are kept for the requeue."),
        ({"time": "6"}, "--time 6: SLURM would ask for a checkpoint at once"),
        ({"sbatch": ("--array=1",)}, "--array cannot be given"),
    ],
)
def test_settings_of_a_job_that_contradict_each_other_are_refused(wrong, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        _check_settings(TINY, replace(SlurmJob(nodes=1), **wrong))


def test_settings_of_a_job_at_their_limits_are_taken():
    job = SlurmJob(nodes=1, spares=0, signal_s=61, time="3")
    _check_settings(TINY, job)
    _check_settings(TINY, replace(job, container="i", container_mounts="/a:/b", resume=True))
    _check_settings(TINY, replace(job, venv=Path("v"), overwrite=True, spares=1, time=None))


def test_a_job_without_gpus_is_left_to_its_nodes():
    assert launch(str(TINY), "--nodes", "9", "--gpus-per-node", "0").exit_code == 0


def test_options_of_sbatch_are_passed_on_but_not_those_that_the_script_sets():
    job = SlurmJob(nodes=1, sbatch=("--qos=high", "--exclude=gpu-[001-004]", "--comment=two words"))
    lines = job_script(TINY, [], job).splitlines()
    assert {"#SBATCH --qos=high", '#SBATCH --exclude="gpu-[001-004]"', '#SBATCH --comment="two words"'} <= set(lines)
    for option in ("--time=1", "--signal=USR1@60", "--exclusive", "--nodes=3"):
        refused = launch(f"{FAMILY}/qwen3_30b_a3b_gspo.yaml", "--nodes", "1", "--sbatch", option)
        assert refused.exit_code == 2
        assert f"--sbatch '{option}': the job script sets {option.partition('=')[0]} itself" in refused.stderr
    for option, meant in (("--node=3", "--nodes"), ("--sig=USR1", "--signal"), ("--ntasks=4", "--ntasks-per-node")):
        with pytest.raises(ValueError, match=f"the job script sets {meant} itself"):
            check_sbatch(TINY, SlurmJob(nodes=1, sbatch=(option,)))
    for option, meant in (("--no-requeue", "no-requeue"), ("--arr=0-3", "array"), ("--wrap=true", "wrap")):
        with pytest.raises(ValueError, match=f"--{meant} cannot be given: "):
            check_sbatch(TINY, SlurmJob(nodes=1, sbatch=(option,)))
    check_sbatch(TINY, SlurmJob(nodes=1, sbatch=("--time-min=5", "--nodelist=a")))
    short = launch(f"{FAMILY}/qwen3_30b_a3b_gspo.yaml", "--nodes", "1", "--sbatch", "-t 5")
    assert short.exit_code == 2
    assert "write it in full" in short.stderr


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> list[str]:
    """Overrides that point the tiny recipe to files that are there."""
    folder = tmp_path_factory.mktemp("files")
    write_toy("qwen3_moe", folder / "model", ToySize(layers=1, hidden=32, moe_intermediate=16), 0)
    data = folder / "data.jsonl"
    data.write_text(json.dumps({"messages": [{"role": "user", "content": "1"}], "label": "1"}) + "\n")
    return [f"model.path={folder / 'model'}", f"data.train={data}", f"data.eval.heldout={data}"]


@pytest.fixture
def submission(files: list[str], tmp_path: Path, monkeypatch):
    """Check the job of a real submission from the root of the repository."""
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("SLIMRL_ROOT", raising=False)

    def check(*overrides: str, **about_job):
        job = replace(SlurmJob(nodes=1, gpus_per_node=0, venv=Path(sys.prefix)), **about_job)
        return check_job(TINY, [*files, f"run.dir={tmp_path}", *overrides], job, files=True)

    return check


def test_what_the_start_would_refuse_of_the_task_is_refused_at_the_submission(submission):
    submission()
    with pytest.raises(RecipeError) as refused:
        submission("reward.function=slimrl.rewards.math:nope", "agent.tools=[nosuch:f]")
    assert {"reward.function", "agent.tools"} <= {problem.key for problem in refused.value.problems}


def test_a_checkpoint_that_is_not_whole_is_refused_at_the_submission(submission, files: list[str], tmp_path: Path):
    model = Path(files[0].removeprefix("model.path="))
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((model / "config.json").read_text())
    with pytest.raises(RecipeError, match=r"model\.path: "):
        submission(f"model.path={bare}")


def test_a_run_folder_that_the_start_would_refuse_is_refused_at_the_submission(submission, tmp_path: Path):
    with pytest.raises(ValueError, match="there is no run to resume"):
        submission("run.name=demo", resume=True)
    run = open_run_folder(tmp_path, "demo", "seed: 1\n")
    before = sorted(run.path.iterdir())
    with pytest.raises(ValueError, match="demo exists, without a checkpoint"):
        submission("run.name=demo")
    submission("run.name=demo", overwrite=True)
    submission("run.name=demo", resume=True)
    # What comes after another job meets another folder.
    submission("run.name=demo", sbatch=("--dependency=afterok:17",))
    assert sorted(run.path.iterdir()) == before
    run.ended_early.touch()
    submission("run.name=demo")
    assert not RunFolder(tmp_path / "other").path.exists()


def test_a_job_that_would_find_no_python_or_no_slimrl_is_not_submitted(submission, tmp_path: Path, monkeypatch):
    with pytest.raises(ValueError, match="/nope/bin/python: no such program"):
        submission(venv=Path("/nope"))
    monkeypatch.setenv("SLIMRL_ROOT", str(tmp_path))
    with pytest.raises(ValueError, match=r"SLIMRL_ROOT is .*, where the job would look for the recipe"):
        submission()
    monkeypatch.delenv("SLIMRL_ROOT")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    with pytest.raises(ValueError, match=f"{tmp_path} has no slimrl, and the job starts there"):
        submission()


def test_packages_that_only_the_image_has_are_no_reason_to_refuse(submission, tmp_path: Path, monkeypatch):
    (tmp_path / "mine.py").write_text("import only_in_the_image\n\ndef score(trajectory, prompt):\n    return 0.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="cannot be imported: No module named 'only_in_the_image'"):
        submission("reward.function=mine:score")
    warnings = submission("reward.function=mine:score", venv=None, container="image.sqsh")
    assert any("No module named 'only_in_the_image'" in str(warning) for warning in warnings)
    with pytest.raises(RecipeError, match=r"run\.dir: .* cannot be written"):
        submission("reward.function=mine:score", "run.dir=/proc/nope", venv=None, container="image.sqsh")


def test_a_dry_run_says_what_would_stop_a_submission_from_here(tmp_path: Path):
    job = (str(TINY), "--nodes", "1", "--gpus-per-node", "0", f"run.dir={tmp_path}", "run.name=none", "model.path=x")
    warned = "recipes/tiny_moe/gspo_calculator.yaml: warning: a submission from here would be refused: "
    said = launch(*job, "--venv", "/none", "--resume")
    assert said.exit_code == 0
    assert f"{warned}/none/bin/python: no such program" in said.stderr
    assert f"{warned}{tmp_path}/none: there is no run to resume." in said.stderr
    assert warned not in launch(*job, "--container", "image").stderr
    assert warned not in launch(*job, "--container", "image", "--resume", "--sbatch", "--dependency=afterok:17").stderr
    (tmp_path / "none").mkdir()
    assert warned in launch(*job, "--container", "image").stderr
    (tmp_path / "none" / "ended_early").touch()
    assert warned not in launch(*job, "--container", "image").stderr
