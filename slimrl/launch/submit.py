"""`slimrl launch slurm`: the job script of a recipe, checked, written and submitted."""

import re
import shlex
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slimrl.config.load import Command
from slimrl.config.problems import Problem, Violation
from slimrl.config.schema import Recipe
from slimrl.launch.mounts import unmounted_paths
from slimrl.launch.reports import LaunchError
from slimrl.models.planned_recipe import read_planned
from slimrl.runtime.placement import place_on_fewest

SIGNAL_S = 300
"""How long before its time limit a job is asked for a checkpoint."""

MARGIN_S = 60
"""Of that, what is kept for the requeue itself."""


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """What is asked of SLURM beside the recipe."""

    nodes: int
    """That the run uses; spares come on top."""
    spares: int = 0
    gpus_per_node: int = 8
    partition: str | None = None
    account: str | None = None
    time: str | None = None
    """Limit in a form that SLURM takes, such as 1-12:00:00."""
    container: str | None = None
    container_mounts: str | None = None
    venv: Path | None = None
    log_dir: Path = Path("runs/slurm")
    cores_per_node: int | None = None
    """This and what follows: None for what slimrl/launch/options.py has."""
    min_free_gib: float | None = None
    object_store_gib: float | None = None
    preflight_timeout_s: float | None = None
    meeting_timeout_s: float | None = None
    signal_s: int = SIGNAL_S
    sft: bool = False
    resume: bool = False
    overwrite: bool = False


def nodes_needed(recipe: Recipe, gpus_per_node: int, *, sft: bool) -> int:
    """The fewest nodes on which trainer ranks and engines have their places.

    Raises:
        ValueError: an engine does not fit on any node.
    """
    num_engines = 0 if sft else recipe.rollout.num_engines
    return place_on_fewest(recipe, gpus_per_node, num_ranks=recipe.trainer.num_ranks, num_engines=num_engines)[1]


def check_job(path: Path, overrides: Sequence[str], job: SlurmJob, *, files: bool) -> tuple[Problem, ...]:
    """Warnings of a recipe and of its job.

    Args:
        files: refuse what a start would not find on this machine, instead of warning of it; an unknown model that is
            not here is left out of the rules.

    Raises:
        RecipeError: the recipe is refused.
        ValueError: the nodes are too few for it, or the job's settings contradict each other.
    """
    command: Command = "sft" if job.sft else "train"
    planned = read_planned(path, overrides, command, files=files, model_needed=False)
    loaded = planned.loaded
    if job.nodes < 1 or job.spares < 0:
        raise ValueError(f"--nodes {job.nodes} --spares {job.spares}: at least one node, and no less than 0 spares.")
    if job.container and job.venv:
        raise ValueError("--container and --venv exclude each other.")
    if job.container_mounts and not job.container:
        raise ValueError("--container-mounts needs --container.")
    if job.resume and job.overwrite:
        raise ValueError("--resume and --overwrite exclude each other.")
    if job.signal_s <= MARGIN_S:
        raise ValueError(f"--signal-s {job.signal_s}: more than the {MARGIN_S} s that the requeue may take.")
    if job.gpus_per_node:
        needed = nodes_needed(loaded.recipe, job.gpus_per_node, sft=job.sft)
        if needed > job.nodes:
            raise ValueError(
                f"{path}: needs {needed} nodes of {job.gpus_per_node} GPUs; --nodes {job.nodes} is too few."
            )
    warnings: list[Violation] = []
    model = loaded.recipe.model.path
    if not Path(model).exists():
        warnings.append(("model.path", f"{model}: {planned.model}."))
    if job.container:
        warnings += unmounted_paths(loaded.recipe, job.log_dir, job.container_mounts or "")
    return (*planned.notes, *(loaded.problem(*warning, warning=True) for warning in warnings))


def job_script(path: Path, overrides: Sequence[str], job: SlurmJob) -> str:
    """The batch script of a job that `check_job` has let pass."""
    directives = {
        "job-name": f"slimrl-{path.stem}",
        "nodes": job.nodes + job.spares,
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
    options: dict[str, object] = {
        "--spares": job.spares,
        "--gpus-per-node": job.gpus_per_node,
        "--log-dir": job.log_dir,
        "--grace-s": job.signal_s - MARGIN_S,
        "--venv": job.venv,
        "--container": job.container,
        "--container-mounts": job.container_mounts,
        "--cores-per-node": job.cores_per_node,
        "--min-free-gib": job.min_free_gib,
        "--object-store-gib": job.object_store_gib,
        "--preflight-timeout-s": job.preflight_timeout_s,
        "--meeting-timeout-s": job.meeting_timeout_s,
    }
    arguments = [text for name, value in options.items() if value is not None for text in (name, str(value))]
    flags = {"--sft": job.sft, "--resume": job.resume, "--overwrite": job.overwrite}
    arguments += [name for name, given in flags.items() if given]
    arguments += [str(path), *overrides]
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH --{name}={quote(str(value))}" for name, value in directives.items() if value is not None),
            "#SBATCH --exclusive",
            "#SBATCH --requeue",
            "set -euo pipefail",
            'cd "${SLIMRL_ROOT:-$SLURM_SUBMIT_DIR}"',
            f'exec "${{SLIMRL_HOST_PYTHON:-python3}}" -m slimrl.launch.job {shlex.join(arguments)}',
            "",
        ]
    )


def quote(value: str) -> str:
    """As sbatch reads it from a #SBATCH line: spaces and # end a value, within double quotes and after \\ they do not.

    Raises:
        ValueError: it has more than one line.
    """
    if "\n" in value:
        raise ValueError(f"{value!r}: more than one line, which a job script cannot hold.")
    if re.fullmatch(r"[\w@%+=:,./-]*", value):
        return value
    return '"' + re.sub(r'(["\\#])', r"\\\1", value) + '"'


def submit(script: str, name: str, log_dir: Path) -> tuple[Path, str]:
    """Write a job's script into `log_dir`, under a name with the time, and submit it.

    Returns:
        The script's file, and what sbatch said.

    Raises:
        LaunchError: sbatch refused it.
    """
    # SLURM drops a job silently whose log it cannot open.
    log_dir.mkdir(parents=True, exist_ok=True)
    file = log_dir / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.sbatch"
    file.write_text(script)
    try:
        answer = subprocess.run(["sbatch", str(file)], capture_output=True, text=True, timeout=60, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"sbatch: {error}. The script is {file}.") from error
    if answer.returncode:
        raise LaunchError(f"sbatch: {answer.stderr.strip()} The script is {file}.")
    return file, answer.stdout.strip()
