"""`slimrl launch slurm`: the job script of a recipe, checked, written and submitted."""

import shlex
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slimrl.config.check import check_loaded
from slimrl.config.load import load_recipe
from slimrl.config.problems import RecipeError
from slimrl.config.schema import Recipe, TransportName
from slimrl.launch.reports import LaunchError

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
    venv: Path | None = None
    log_dir: Path = Path("runs/slurm")
    signal_s: int = SIGNAL_S
    sft: bool = False
    resume: bool = False
    overwrite: bool = False


def devices_needed(recipe: Recipe, *, sft: bool) -> int:
    """GPUs of a run: engines share the trainer's where they are colocated or receive weights over ipc."""
    trainer = recipe.trainer.num_ranks
    if sft:
        return trainer
    engines = recipe.rollout.num_engines * recipe.rollout.engine_tensor
    shared = recipe.rollout.colocated or recipe.resync.transport is TransportName.ipc
    return max(trainer, engines) if shared else trainer + engines


def job_script(path: Path, overrides: Sequence[str], job: SlurmJob) -> str:
    """The batch script of a checked recipe.

    Raises:
        RecipeError: the recipe is refused.
        ValueError: the nodes are too few for it, or the job's settings contradict each other.
    """
    _check(path, overrides, job)
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
    }
    arguments = [text for name, value in options.items() if value is not None for text in (name, str(value))]
    flags = {"--sft": job.sft, "--resume": job.resume, "--overwrite": job.overwrite}
    arguments += [name for name, given in flags.items() if given]
    arguments += [str(path), *overrides]
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH --{name}={value}" for name, value in directives.items() if value is not None),
            "#SBATCH --exclusive",
            "#SBATCH --requeue",
            "set -euo pipefail",
            'cd "${SLIMRL_ROOT:-$SLURM_SUBMIT_DIR}"',
            f'exec "${{SLIMRL_HOST_PYTHON:-python3}}" -m slimrl.launch.job {shlex.join(arguments)}',
            "",
        ]
    )


def submit(path: Path, overrides: Sequence[str], job: SlurmJob) -> tuple[Path, str]:
    """Write the script into `log_dir` and submit it.

    Returns:
        The script's file, and what sbatch said.

    Raises:
        ValueError: as job_script.
        LaunchError: sbatch refused it.
    """
    script = job_script(path, overrides, job)
    # SLURM drops a job silently whose log it cannot open.
    job.log_dir.mkdir(parents=True, exist_ok=True)
    file = job.log_dir / f"{path.stem}-{time.strftime('%Y%m%d-%H%M%S')}.sbatch"
    file.write_text(script)
    try:
        answer = subprocess.run(["sbatch", str(file)], capture_output=True, text=True, timeout=60, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"sbatch: {error}. The script is {file}.") from error
    if answer.returncode:
        raise LaunchError(f"sbatch: {answer.stderr.strip()} The script is {file}.")
    return file, answer.stdout.strip()


def _check(path: Path, overrides: Sequence[str], job: SlurmJob) -> None:
    loaded = load_recipe(path, overrides, "sft" if job.sft else "train")
    if problems := [problem for problem in check_loaded(loaded) if not problem.warning]:
        raise RecipeError(problems)
    if job.nodes < 1 or job.spares < 0:
        raise ValueError(f"--nodes {job.nodes} --spares {job.spares}: at least one node, and no less than 0 spares.")
    if job.container and job.venv:
        raise ValueError("--container and --venv exclude each other.")
    if job.resume and job.overwrite:
        raise ValueError("--resume and --overwrite exclude each other.")
    if job.signal_s <= MARGIN_S:
        raise ValueError(f"--signal-s {job.signal_s}: more than the {MARGIN_S} s that the requeue may take.")
    needed = devices_needed(loaded.recipe, sft=job.sft)
    if job.gpus_per_node and needed > job.nodes * job.gpus_per_node:
        nodes = -(-needed // job.gpus_per_node)
        raise ValueError(
            f"{path}: needs {needed} GPUs; --nodes {job.nodes} of {job.gpus_per_node} have "
            f"{job.nodes * job.gpus_per_node}. Use --nodes {nodes}."
        )
