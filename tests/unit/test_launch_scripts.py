"""Job scripts as sbatch and bash read them, and launch/local.sh."""

import argparse
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from slimrl.config.load import load_recipe
from slimrl.config.schema.recipe import Recipe
from slimrl.launch.job_check import unmounted_paths
from slimrl.launch.options import add_options
from slimrl.launch.reports import LaunchError
from slimrl.launch.submit import SlurmJob, job_script, nodes_needed, quote, submit

ROOT = Path(__file__).parents[2]


def sbatch_words(line: str) -> list[str]:
    """Words of a #SBATCH line by sbatch's rules: quotes of both kinds, a backslash keeps the next character as it is,
    a # outside of quotes begins a comment."""
    words, word, quoted, kept = [], None, "", False
    for character in line:
        if kept or (quoted and character not in (quoted, "\\")):
            word, kept = (word or "") + character, False
        elif character == "\\":
            kept = True
        elif character in "\"'":
            word, quoted = word or "", "" if quoted else character
        elif character == "#":
            break
        elif character.isspace():
            words += [] if word is None else [word]
            word = None
        else:
            word = (word or "") + character
    assert not quoted
    return words + ([] if word is None else [word])


@pytest.mark.parametrize("value", ["plain-1_2%j.log", "my acct", "it's", 'a "b" c', "a#b", "back\\slash", "Zürich 1"])
def test_sbatch_reads_a_value_as_it_was_given(value: str):
    assert sbatch_words(f"--account={quote(value)} --next") == [f"--account={value}", "--next"]
    assert (quote(value) == value) is (value == "plain-1_2%j.log")


def test_a_value_of_two_lines_is_refused():
    with pytest.raises(ValueError, match="more than one line"):
        quote("a\n#SBATCH --wrap=x")


def test_what_a_user_gives_reaches_sbatch_and_the_job_as_it_is(tmp_path: Path):
    recipe = tmp_path / "my recipe.yaml"
    overrides = ["agent.tools=[a:f, b:g]", 'run.name="it\'s $HOME"', "trainer.megatron={moe_layer_freq: [0, 1]}"]
    job = SlurmJob(
        nodes=2,
        account="my acct",
        log_dir=tmp_path / "my logs",
        container="docker://registry/image:1",
        container_mounts="/my models:/models,/data:/data",
        cores_per_node=32,
        min_free_gib=100.5,
        object_store_gib=2.0,
        preflight_timeout_s=10.0,
        allreduce_timeout_s=20.0,
        sft=True,
    )
    script = job_script(recipe, overrides, job)
    directives = [word for line in script.splitlines() if line.startswith("#SBATCH") for word in sbatch_words(line[7:])]
    assert "--account=my acct" in directives
    assert f"--output={tmp_path}/my logs/%j.log" in directives
    assert "--job-name=slimrl-my recipe" in directives
    assert all(word.startswith("--") for word in directives)

    words = shlex.split(script.splitlines()[-1])
    parser = argparse.ArgumentParser()
    add_options(parser)
    options = parser.parse_args(words[words.index("slimrl.launch.job") + 1 :])
    assert options.rest == [str(recipe), *overrides]
    assert options.sft
    given = {name: value for name, value in vars(job).items() if name in vars(options) and value is not None}
    assert given == {name: getattr(options, name) for name in given}
    assert {"container_mounts", "cores_per_node", "min_free_gib", "object_store_gib", "log_dir"} <= set(given)
    assert options.grace_s == job.signal_s - 60


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            FileNotFoundError("no sbatch"),
            "There is no sbatch on this machine. Submit the script where SLURM is installed: sbatch ",
        ),
        (subprocess.TimeoutExpired("sbatch", 60), "timed out after 60 seconds. The script is "),
        ((1, "", "invalid account\n"), "sbatch: invalid account The script is "),
        ((0, "Submitted batch job 5\n", ""), None),
    ],
)
def test_a_script_is_kept_whatever_sbatch_makes_of_it(tmp_path: Path, monkeypatch, answer, said):
    asked = []

    def run(command, *, check, **how):
        asked.append(command)
        assert (check, how) == (False, {"capture_output": True, "text": True, "timeout": 60})
        if isinstance(answer, Exception):
            raise answer
        return subprocess.CompletedProcess(command, *answer)

    monkeypatch.setattr(subprocess, "run", run)
    folder = tmp_path / "new" / "logs"
    if said is None:
        assert submit("script", "demo", folder)[1] == "Submitted batch job 5"
        submit("again", "demo", folder)
    else:
        with pytest.raises(LaunchError, match=re.escape(said)):
            submit("script", "demo", folder)
    file = Path(asked[0][1])
    assert asked[0] == ["sbatch", str(file)]
    assert file.parent == folder
    assert re.fullmatch(r"demo-\d{8}-\d{6}\.sbatch", file.name)
    assert file.read_text() in ("script", "again")


def test_paths_that_a_container_does_not_see_are_told():
    recipe = Recipe()
    recipe.run.dir, recipe.model.path, recipe.data.train = "runs", "/models/qwen/30b", "/data/train.jsonl"
    recipe.data.eval = {"heldout": "/logs/heldout.jsonl", "other": "/database/x.jsonl"}

    def unseen(mounts: str) -> set[str]:
        return {key for key, _ in unmounted_paths(recipe, Path("/logs"), mounts)}

    assert unseen("") == {"model.path", "data.train", "data.eval.other"}
    assert unseen("/scratch/m:/models:ro,/data") == {"data.eval.other"}
    assert unseen("/models:/m,/nfs/database:/database,/data/train.jsonl:/data/train.jsonl") == {"model.path"}


def test_the_ray_job_has_the_gpus_of_its_recipe():
    job = yaml.safe_load((ROOT / "launch" / "kuberay" / "rayjob.yaml").read_text())
    words = job["spec"]["entrypoint"].split()
    path = next(word for word in words if word.endswith(".yaml"))
    needed = [
        "model.path=/shared/model",
        "data.train=/shared/train.jsonl",
        "reward.function=own.task:reward",
    ]
    recipe = load_recipe(ROOT / path, needed).recipe
    cluster = job["spec"]["rayClusterSpec"]
    pods = [(1, cluster["headGroupSpec"]), *((group["replicas"], group) for group in cluster["workerGroupSpecs"])]
    gpus = set()
    for _, group in pods:
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        gpus |= {int(limits["nvidia.com/gpu"]), int(group["rayStartParams"]["num-gpus"])}
    assert len(gpus) == 1
    assert sum(count for count, _ in pods) == nodes_needed(recipe, gpus.pop(), sft=False)


def test_the_entrypoint_of_the_ray_job_runs_whole_in_the_ray_job(tmp_path: Path):
    entrypoint = yaml.safe_load((ROOT / "launch" / "kuberay" / "rayjob.yaml").read_text())["spec"]["entrypoint"]
    command = entrypoint.strip().replace("/shared/slimrl", str(ROOT))
    submitted = tmp_path / "submitted"
    take = f'while [ "$1" != -- ]; do shift; done; shift; printf \'%s\\n\' "$@" >{submitted}'
    for name, text in {"ray": take, "python3": 'echo "$PWD" "$@"'}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "RAY_ADDRESS": "head:8265"}
    # As KubeRay has it in the pod that submits, which a shell reads.
    line = f"if true ; then ray job submit --address http://head:8265 --no-wait -- {command} ; fi"
    said = subprocess.run(["bash", "-c", line], env=env, capture_output=True, text=True, timeout=30, check=True)
    assert (said.stdout, said.stderr) == ("", "")
    # As Ray's job server has it on the head node, from the words that were submitted.
    job = shlex.join(submitted.read_text().splitlines())
    env["RAY_ADDRESS"] = "10.0.0.1:6379"
    said = subprocess.run(job, shell=True, env=env, cwd="/", capture_output=True, text=True, timeout=30, check=True)
    recipe = "recipes/qwen3_moe/qwen3_30b_a3b_gspo_disaggregated.yaml"
    arguments = f"{recipe} run.dir=/shared/runs --resume-or-start --ray-address 10.0.0.1:6379"
    assert said.stdout == f"{ROOT} -m slimrl.cli train {arguments}\n"
    without = {"PATH": env["PATH"]}
    refused = subprocess.run(job, shell=True, env=without, capture_output=True, text=True, timeout=30, check=False)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "RAY_ADDRESS: not set" in refused.stderr


def local_run(folder: Path, *arguments: str, nvidia_smi: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """launch/local.sh with a Python that prints what it is started with."""
    for name, text in {"python": 'echo "$@"', "nvidia-smi": nvidia_smi}.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    env = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "SLIMRL_PYTHON": str(folder / "python"), **environment}
    script = ROOT / "launch" / "local.sh"
    return subprocess.run(
        [script, *arguments], env=env, cwd=folder, capture_output=True, text=True, timeout=30, check=False
    )


def test_a_local_run_has_the_gpus_that_nvidia_smi_lists_and_checks_no_ports(tmp_path: Path):
    two = "echo 'GPU 0: NVIDIA H200 (UUID: GPU-1)'; echo 'GPU 1: NVIDIA H200 (UUID: GPU-2)'"
    check, run = local_run(tmp_path, "r.yaml", "a.b=[1, 2]", nvidia_smi=two).stdout.splitlines()
    assert " --gpus 2 " in check
    assert "port" not in check
    assert run == "-m slimrl.cli train r.yaml a.b=[1, 2]"
    check, run = local_run(tmp_path, "--sft", "r.yaml", nvidia_smi=two, SLIMRL_GPUS="1").stdout.splitlines()
    assert " --gpus 1 " in check
    assert run == "-m slimrl.cli sft r.yaml"


def test_a_local_run_without_an_answer_of_nvidia_smi_ends_with_what_it_says(tmp_path: Path):
    broken = local_run(tmp_path, "r.yaml", nvidia_smi="echo 'cannot talk to the driver'; exit 9")
    assert (broken.returncode, broken.stdout) == (1, "")
    assert broken.stderr.startswith("nvidia-smi fails: cannot talk to the driver")
    without = local_run(tmp_path, "r.yaml", nvidia_smi="exit 9", SLIMRL_GPUS="0")
    assert " --gpus 0 " in without.stdout


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"]], ids=" ".join)
def test_a_local_run_without_a_recipe_says_how_it_is_used(tmp_path: Path, arguments: list[str]):
    said = local_run(tmp_path, *arguments, nvidia_smi="exit 9")
    assert (said.returncode, said.stderr) == (0, "")
    assert "launch/local.sh [--sft] RECIPE [KEY=VALUE]..." in said.stdout
    assert {"SLIMRL_PYTHON:", "SLIMRL_GPUS:", "SLIMRL_MIN_FREE_GIB:"} <= set(said.stdout.split())
    assert "set -euo" not in said.stdout


def test_a_local_run_stays_in_the_working_directory_and_says_where_python_is_missing(tmp_path: Path):
    here = local_run(tmp_path, "mine.yaml", nvidia_smi="exit 9", SLIMRL_GPUS="0", SLIMRL_PYTHON=str(tmp_path / "where"))
    assert here.returncode == 2
    assert here.stderr.startswith(f"{tmp_path / 'where'}: no such program. Run `make setup` in {ROOT}")
    (tmp_path / "where").write_text("#!/bin/bash\npwd\n")
    (tmp_path / "where").chmod(0o755)
    here = local_run(tmp_path, "mine.yaml", nvidia_smi="exit 9", SLIMRL_GPUS="0", SLIMRL_PYTHON=str(tmp_path / "where"))
    assert here.stdout.splitlines() == [str(tmp_path)] * 2
