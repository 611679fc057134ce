"""`slimrl launch slurm`: writes the job script of a recipe that has passed job_check.py, and submits it."""

import re
import shlex
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slimrl.config.schema.recipe import Recipe
from slimrl.launch.reports import LaunchError
from slimrl.runtime.cluster.placement import place_on_fewest

SIGNAL_S = 300
"""Seconds before its time limit at which SLURM asks a job for a checkpoint."""

MARGIN_S = 60
"""Seconds of SIGNAL_S that are kept for the requeue."""

FLAGS = ("--exclusive", "--requeue")
"""Options of sbatch that every job has."""

REFUSED = {
    "no-requeue": "a preempted job has to be requeued",
    "array": "each job of the array would be the same run",
    "wrap": "it replaces the job script",
}
"""Options of sbatch that no job may have -> why."""

PASSED_ON = (
    *("spares", "gpus_per_node", "log_dir", "venv", "container", "container_mounts", "cores_per_node"),
    *("min_free_gib", "object_store_gib", "preflight_timeout_s", "allreduce_timeout_s"),
)
"""Settings of a job that become options of slimrl.launch.job, under the same names."""


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """Settings of a job that are not in its recipe."""

    nodes: int
    """Number of nodes without spares"""
    spares: int = 0
    spare_nodes: int = 0
    """Number of nodes that the recipe keeps free"""
    gpus_per_node: int = 8
    partition: str | None = None
    account: str | None = None
    time: str | None = None
    """Time limit in SLURM's form, such as 1-12:00:00"""
    container: str | None = None
    container_mounts: str | None = None
    venv: Path | None = None
    log_dir: Path = Path("runs/slurm")
    cores_per_node: int | None = None
    """Number of cores per node; None for the default of slimrl/launch/options.py, as for the following."""
    min_free_gib: float | None = None
    object_store_gib: float | None = None
    preflight_timeout_s: float | None = None
    allreduce_timeout_s: float | None = None
    sbatch: tuple[str, ...] = ()
    """Further options of sbatch, each `--NAME` or `--NAME=VALUE`"""
    signal_s: int = SIGNAL_S
    name: str | None = None
    """The run's name, after which the job is named; None for that of the recipe's file"""
    sft: bool = False
    resume: bool = False
    overwrite: bool = False


def nodes_needed(recipe: Recipe, gpus_per_node: int, *, sft: bool) -> int:
    """The fewest nodes that have room for all trainer ranks, engines, the teacher, older versions and the critic.

    Raises:
        ValueError: an engine does not fit on a node.
    """
    return place_on_fewest(recipe, gpus_per_node, **process_counts(recipe, sft=sft))[1]


def process_counts(recipe: Recipe, *, sft: bool) -> dict[str, int]:
    """What a job has to place, by the arguments of `place`."""
    return {
        "num_ranks": recipe.trainer.num_ranks,
        "num_engines": 0 if sft else recipe.rollout.num_engines,
        "num_teachers": 0 if sft else recipe.teacher.engines_to_start,
        "num_past": 0 if sft else recipe.past_engines,
        "num_critics": 0 if sft else recipe.critic_ranks,
    }


def job_script(path: Path, overrides: Sequence[str], job: SlurmJob) -> str:
    """The batch script of a job that has passed `check_job`."""
    lines = [f"--{name}={value}" for name, value in _directives(path, job).items() if value is not None]
    values = {name: getattr(job, name) for name in PASSED_ON} | {"grace_s": job.signal_s - MARGIN_S}
    arguments = [
        text
        for name, value in values.items()
        if value is not None
        for text in (f"--{name.replace('_', '-')}", str(value))
    ]
    arguments += [f"--{name}" for name in ("sft", "resume", "overwrite") if getattr(job, name)]
    if job.spare_nodes:
        arguments += ["--spare-nodes", str(job.spare_nodes)]
    arguments += [str(path), *overrides]
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {_quoted(line)}" for line in (*lines, *_flags(job), *job.sbatch)),
            f"# SLURM drops a job whose log it cannot open. Before sbatch: mkdir -p {shlex.quote(str(job.log_dir))}",
            "set -euo pipefail",
            'cd "${SLIMRL_ROOT:-${SLURM_SUBMIT_DIR:?submit this script with sbatch}}"',
            f'exec "${{SLIMRL_HOST_PYTHON:-python3}}" -m slimrl.launch.job {shlex.join(arguments)}',
            "",
        ]
    )


def _flags(job: SlurmJob) -> list[str]:
    """sbatch options without values. A job without spare nodes ends with a lost node, and SLURM queues it again."""
    return [*FLAGS, *(["--no-kill"] if job.spare_nodes else [])]


def _directives(path: Path, job: SlurmJob) -> dict[str, object]:
    """sbatch options with values; None leaves one to SLURM."""
    return {
        "job-name": f"slimrl-{job_name(path, job)}",
        "nodes": job.nodes + job.spare_nodes + job.spares,
        "ntasks-per-node": 1,
        "gpus-per-node": job.gpus_per_node or None,
        "partition": job.partition,
        "account": job.account,
        "time": job.time,
        "signal": f"B:USR1@{job.signal_s}",
        "mem": 0,
        "open-mode": "append",
        "output": job.log_dir / "%j.log",
    }


def job_name(path: Path, job: SlurmJob) -> str:
    """The job's name, without `slimrl-`."""
    return job.name or path.stem


def check_sbatch(path: Path, job: SlurmJob) -> None:
    """Check the further sbatch options.

    sbatch accepts any unambiguous prefix of an option's name, so prefixes are refused too.

    Raises:
        ValueError: an option is not `--NAME` or `--NAME=VALUE`, is set by the job script itself, or is in REFUSED.
    """
    own = {*_directives(path, job), *(flag.removeprefix("--") for flag in _flags(job))}
    for option in job.sbatch:
        found = re.fullmatch(r"--([a-z][a-z0-9-]*)(?:=.+)?", option)
        if found is None:
            raise ValueError(f"--sbatch {option!r}: write it in full, --NAME or --NAME=VALUE.")
        meant = min((name for name in (*own, *REFUSED) if name.startswith(found.group(1))), default="")
        if meant in REFUSED:
            raise ValueError(f"--sbatch {option!r}: --{meant} cannot be given: {REFUSED[meant]}.")
        if meant:
            raise ValueError(
                f"--sbatch {option!r}: the job script sets --{meant} itself; see slimrl launch slurm --help."
            )


def _quoted(option: str) -> str:
    name, equals, value = option.partition("=")
    return name + equals + quote(value)


def quote(value: str) -> str:
    """Quote a value for a #SBATCH line, where a space or # ends an unquoted value.

    Raises:
        ValueError: it has more than one line.
    """
    if "\n" in value:
        raise ValueError(f"{value!r}: an option in a job script cannot have more than one line.")
    if re.fullmatch(r"[\w@%+=:,./-]*", value):
        return value
    return '"' + re.sub(r'(["\\#])', r"\\\1", value) + '"'


def submit(script: str, name: str, log_dir: Path) -> tuple[Path, str]:
    """Write a job script into `log_dir`, with the time in its name, and submit it; returns file and sbatch's answer.

    Raises:
        LaunchError: sbatch refused it.
    """
    # SLURM silently drops a job whose log it cannot open.
    log_dir.mkdir(parents=True, exist_ok=True)
    file = log_dir / f"{name.replace('/', '_')}-{time.strftime('%Y%m%d-%H%M%S')}.sbatch"
    file.write_text(script)
    try:
        answer = subprocess.run(["sbatch", str(file)], capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError as error:
        raise LaunchError(
            f"There is no sbatch on this machine. Submit the script where SLURM is installed: sbatch {file}"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise LaunchError(f"sbatch: {error}. The script is {file}.") from error
    if answer.returncode:
        raise LaunchError(f"sbatch: {answer.stderr.strip()} The script is {file}.")
    return file, answer.stdout.strip()
